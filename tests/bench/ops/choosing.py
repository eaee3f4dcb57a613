"""Choice of an op's providers by words, as a run makes it."""

from weft.bench.ops.workload import OpWorkload


def choose(op, words, simulated=False):
    return OpWorkload(name=op, shapes=(), words=tuple(words)).providers(simulated)
