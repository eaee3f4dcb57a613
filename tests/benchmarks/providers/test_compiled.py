"""torch.compile as a baseline of layers and models: what it is asked for, and its recipe without the compiler."""

import types

import pytest
import torch

import weft
from tests.bench.models.test_workload import run, workload
from tests.benchmarks.providers.loaded import loaded
from weft.bench.harness.provider import Unavailable
from weft.bench.models.baseline import Baseline, Functions, attend
from weft.bench.models.sessions import TorchSession, build, shard_of
from weft.bench.models.steps import TINY_CONFIG
from weft.parallel.reference import Reference

pytestmark = pytest.mark.skipif(torch.cuda.device_count() > 0, reason="for machines without a GPU")
compiled = loaded("compiled")


def test_the_sharded_baseline_is_the_model():
    """The recipe that torch's micro-pipelining rewrites, not compiled: each rank has half of the rows."""

    def main(team):
        baseline = Baseline(build(TINY_CONFIG, team, "torch", torch.float32))
        scatter, gather = team.library.reduce_scatter, team.library.all_gather
        recipe = compiled.Sharded(team=team, attend=attend, all_reduce=scatter, gather=gather)
        layers = {"layer": recipe.decoder_layer, "attention": recipe.attention, "mlp": recipe.mlp}
        # As a compiled function, with the recipe for its first argument.
        functions = Functions(
            recipe=recipe, gather=gather, **{name: lambda _, *rest, f=f: f(*rest) for name, f in layers.items()}
        )
        tokens = torch.randint(130, (2, 6), generator=torch.Generator().manual_seed(0))
        expected, found = (TorchSession(baseline, 2, 6, run) for run in (None, functions))
        logits = [session.prefill(tokens, session.prompts(6)) for session in (expected, found)]
        torch.testing.assert_close(*logits, atol=1e-4, rtol=1e-4)
        x = torch.randn(12, TINY_CONFIG.hidden_size, generator=torch.Generator().manual_seed(1))
        whole, part = expected.mlp(0, x, 12), found.mlp(0, shard_of(x, team), 12)
        torch.testing.assert_close(part, shard_of(whole, team), atol=1e-4, rtol=1e-4)
        return expected.is_sharded(12), found.is_sharded(12)

    assert weft.simulate(main, 2) == [(False, True)] * 2


def test_torch_compile_says_what_it_cannot_build():
    one, two = types.SimpleNamespace(size=1), types.SimpleNamespace(size=2)
    for make, arguments, reason in (
        (compiled.symmetric, (one, 1, 10240), "one rank: nothing to sum"),
        (compiled.symmetric, (two, 4096, 40 << 20), "sums of 40 MiB: NCCL takes less time"),
        (compiled.pipelined, (two, 4095), "4095 tokens are not split evenly over 2 ranks"),
    ):
        with pytest.raises(Unavailable, match=reason):
            make(*arguments)


def test_answers_are_timed_beside_torch_compile_with_nccl_and_with_symmetric_memory(monkeypatch):
    """A decoding step's functions are compiled for the batch, prompts are read eagerly."""
    names = ["torch.compile", "torch.compile+symm"]
    made = workload("generate", "3x5+3", providers=tuple(names))
    assert [provider.name for provider in made.providers()] == names
    assert [provider.name for provider in made.available()][3:] == ["torch.eager", *names]
    rows = run(made, check_only=True).rows
    assert all("does not run on simulated ranks" in row.reason for row in rows)

    asked = []

    def functions(name):
        def make(team, rows, *nbytes):
            asked.append((name, rows, *nbytes))
            return Functions(recipe=Reference(team=team, attend=attend, all_reduce=team.library.all_reduce))

        return make

    monkeypatch.setattr(compiled, "check_compiles", lambda team: None)
    monkeypatch.setattr(compiled, "compiled", functions("nccl"))
    monkeypatch.setattr(compiled, "symmetric", functions("symm"))
    assert [row.reason for row in run(made, check_only=True).rows] == [None, None]
    assert set(asked) == {("nccl", 3), ("symm", 3, 3 * TINY_CONFIG.hidden_size * 2)}
