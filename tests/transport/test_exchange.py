"""The exchange kernel with other functions, and the names by which its kernels go."""

import pytest
import torch
import triton
import triton.language as tl

import weft
from tests.compiling import a_view, compiled_exchange
from weft.ops.collectives import all_gather, all_reduce, all_to_all, reduce_scatter
from weft.ops.moe.exchange import lamport
from weft.transport.exchange import Body, launch, place_of, whole
from weft.transport.plans import PushPlan
from weft.transport.push import is_rank

BODIES = (
    all_gather.BODY, all_to_all.BODY, reduce_scatter.BODY, all_reduce.ONE_SHOT, lamport.GATHER, lamport.GATHER_FP8,
    lamport.COMBINE,
)  # fmt: skip


@triton.jit
def largest(received, message, tile, team):
    start, columns, inside = place_of(message, tile, received.shape[1])
    rows = tl.where(is_rank(team, received.shape[0]), received, -float("inf"))
    tl.store(message.out + start + columns, tl.max(rows, axis=0), mask=inside)


@pytest.mark.parametrize("own", [whole, None])
def test_a_collective_is_three_small_functions(own):
    """Own tiles are loaded again by ``own``, or kept since they were sent."""
    body = Body(name="largest_kernel", send=whole, own=own, store=largest)
    plan = PushPlan(transport="lamport", row_bytes=64, num_warps=1)

    def main(team):
        x = torch.randn(100, generator=torch.Generator().manual_seed(team.rank))
        out = torch.empty_like(x)
        launch(body, (x, out, 100), torch.float32, team, plan)
        return x, out

    found = weft.simulate(main, 3, sms=2)
    expected = torch.stack([x for x, _ in found]).amax(0)
    assert all(torch.equal(out, expected) for _, out in found)


def test_kernels_go_by_the_names_of_their_bodies():
    """In profiles, by which breakdowns tell communication; and their launches are kept by these names."""
    assert len({body.name for body in BODIES}) == len(BODIES)
    x = torch.zeros(16, dtype=torch.int32)
    kernel = compiled_exchange(
        all_gather.BODY, x, x, 4096, x, x, a_view(), arch="sm_90", BLOCK=256, ROWS=4, TRANSPORT="keyed", num_warps=4
    )
    assert kernel.metadata.name == "all_gather_kernel"
