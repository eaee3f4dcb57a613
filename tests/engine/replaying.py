"""The same decode step again and again, as a CUDA graph and eager."""

from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import torch
from triton.runtime.jit import JITFunction

from weft.engine import EngineConfig, Runner, SamplingParams
from weft.engine.params import Kind
from weft.engine.slots import SlotState
from weft.models import Decoder


@contextmanager
def one_kernel_after_the_other():
    """No kernel begins before the one before it has ended (programmatic dependent launch)."""
    run = JITFunction.run

    def without(self, *arguments, launch_pdl=False, **options):
        return run(self, *arguments, **options)

    JITFunction.run = without
    try:
        yield
    finally:
        JITFunction.run = run


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """Way to run a decode step ``count`` times: in a bucket, as a graph or eager, with programmatic launch or without."""

    bucket: int = 4
    count: int = 1
    graph: bool = False
    pdl: bool = True


def graphs_and_eager(replays):
    """In the bucket of 4, in that of 8, eager, and eager without programmatic launch."""
    return Way(count=20, graph=True), Way(bucket=8, count=replays, graph=True), Way(), Way(pdl=False)


def replayed(team, directory, ways, **form):
    """[(tokens of the same step, keys and values after it)] by each of the ``ways``, which gives the same bits each time.

    form  of the model: its dtype, in bf16 with kernels for few rows and deferred norms; the format of its weights
    """
    model = Decoder.from_pretrained(directory, team, mode="replicated", **form)
    runner = Runner(model, EngineConfig(max_batch=8, page_size=16, max_seq_len=96))
    params = SamplingParams(temperature=1.0, top_p=0.9, seed=3)
    generator = torch.Generator(team.device).manual_seed(1)
    context = torch.randn(runner.cache.data.shape, generator=generator, device=team.device)
    start = torch.arange(8, device=team.device) * 5
    rows = {
        slot: SlotState(position=40 + slot, pages=list(range(1 + 4 * slot, 5 + 4 * slot)), params=params)
        for slot in range(4)
    }
    found = []
    for way in ways:
        runner.cuda_graph = way.graph
        states = []
        with nullcontext() if way.pdl else one_kernel_after_the_other():
            for _ in range(way.count):
                runner.slots.forget()
                runner.slots.send(rows)
                runner.cache.data.copy_(context)
                runner.decoding.tokens.copy_(start)
                runner.replay(way.bucket, Kind.NUCLEUS)
                states.append((runner.decoding.tokens[:4].clone(), runner.cache.data[:, :, 1:17].sum(-1)))
        for tokens, cached in states:
            assert torch.equal(tokens, states[0][0]) and torch.equal(cached, states[0][1]), f"{way}: a step differs"
        found.append([part.cpu() for part in states[0]])
    return found
