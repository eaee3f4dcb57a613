"""The ops of a decode layer together: races, grids, schemas, and compilation without graph breaks."""

import importlib

import pytest
import torch

import weft
import weft.check
from tests.ops.checking import assert_identical, call_op, check, everyone_of, inputs_of
from tests.ops.layer_cases import EPS, layer_arguments
from weft import ops
from weft.kernels.paged_cache import Sequences
from weft.ops.op import registered
from weft.runtime.arithmetic import cdiv

attention = importlib.import_module("weft.ops.attention.paged_attention")


FAMILIES = tuple(f"weft.ops.{family}." for family in ("attention", "elementwise", "linear_attention", "vocab"))
OPS = [
    op
    for op in registered()
    if type(op).__module__.startswith(FAMILIES) and {case.world_size for case in op.cases()} == {1}
]


@pytest.mark.gpu(1)
@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_every_case_on_a_gpu(op):
    for case in (*op.cases(), *op.large_cases()):
        for call in range(2):
            result = call_op(case, None, inputs_of(case, 0, call, "cuda"))
            check(case, 0, everyone_of(case, call, "cuda"), result, what=f"call {call}")


@pytest.mark.parametrize("schedules", [4, pytest.param(20, marks=pytest.mark.sweep)])
def test_no_races(schedules):
    def layer(team):
        new, attended = layer_arguments()
        for _ in range(2):
            q = ops.qk_norm_rope(*new)
            x, keys, values, pages, lengths, scale, tickets = attended
            design = attention.SplitKV(block_n=16, least=16, splits=16, num_warps=1)
            given = attention.PagedArguments(x, keys, values, Sequences(pages, lengths), scale, tickets, None)
            out = attention.PAGED_ATTENTION.run(design, None, given)
            normed, hidden = ops.add_rms_norm(out.view(1, -1), out.view(1, -1), torch.ones(out.numel()), EPS)
            ops.silu_mul(normed)
        return q, hidden

    report = weft.check.check(layer, 1, schedules=schedules)
    assert report.ok, str(report)


class Launch:
    """A stand-in for a kernel, which records the grids it is launched with."""

    params = ()

    def __init__(self):
        self.grids = []

    def __getitem__(self, grid):
        self.grids.append(grid)
        return lambda *_, **__: None


def many_rows(rows):
    ints, logits = torch.zeros(rows, dtype=torch.int32), torch.ones(rows, 2)
    cache, pages = torch.empty(1, 1, 64, 16), torch.zeros(1, cdiv(rows, 64), dtype=torch.int32)
    return {
        "silu_mul": lambda: ops.silu_mul(torch.empty(4 * rows, 2)),
        "sigmoid_mul": lambda: ops.sigmoid_mul(*[torch.empty(4 * rows, 1)] * 2),
        "sample_argmax": lambda: ops.sample_argmax(logits, 0),
        "top_p_mass": lambda: ops.top_p_mass(logits, ints.float(), ints.float(), ints, 28),
        "paged_prefill_attention": lambda: ops.paged_prefill_attention(
            torch.empty(rows, 16, 16), cache, cache, pages, [(0, rows)]
        ),
    }


@pytest.mark.parametrize("op", many_rows(1))
def test_more_rows_than_a_grid_has_along_any_axis_but_the_first(op, monkeypatch):
    """65,535 programs are CUDA's limit along the others."""
    kernel = Launch()
    monkeypatch.setattr(importlib.import_module(getattr(weft.ops, op).__module__), f"{op}_kernel", kernel)
    weft.simulate(lambda team: many_rows(70_000)[op](), 1)
    [(first, *others)] = kernel.grids
    assert first >= 70_000 and all(count < 100 for count in others)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiles_without_a_graph_break(backend):
    def layer(qkv, q_weight, k_weight, eps, angles, positions, slots, keys, values, pages, lengths, tickets):
        q = ops.qk_norm_rope(qkv, q_weight, k_weight, eps, angles, positions, slots, keys, values)
        out = ops.paged_attention(q[:1], keys, values, pages, lengths, tickets=tickets).flatten(1)
        normed, hidden = ops.add_rms_norm(out, out, torch.ones(out.shape[1]), eps)
        return ops.silu_mul(normed) + hidden[:, :1]

    def main(team):
        results = []
        for function in (layer, torch.compile(layer, fullgraph=True, backend=backend)):
            new, (_, _, _, pages, lengths, _, tickets) = layer_arguments()
            results.append((function(*new, pages, lengths, tickets), new[-2], new[-1]))
        for a, b in zip(*results, strict=True):
            assert_identical(a, b)

    weft.simulate(main, 1)
    torch._dynamo.reset()
