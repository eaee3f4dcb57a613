"""sequence_to_heads and heads_to_sequence: arguments, gradients, layouts, and the code for GPUs."""

import re

import pytest
import torch
import triton

import weft
from tests.compiling import TARGETS, a_view, compiled
from tests.sampled import sampled
from weft import ops
from weft.ops.collectives.head_exchange import Part, exchange_heads_kernel
from weft.transport.plans import PushPlan
from weft.transport.push import registers_of


def draw(team, *shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(100 * seed + team.rank), dtype=torch.float32)


@pytest.mark.weft(world_size=2, schedules=2)
def test_heads_of_a_fused_projection_need_no_copy_and_come_back(team):
    W, tokens = team.size, (3, 5)
    qkv = draw(team, tokens[team.rank], (2 * W + 2 * W) * 8)
    q, k, v = (x.unflatten(1, (-1, 8)) for x in qkv.split([2 * W * 8, W * 8, W * 8], dim=1))
    by_head = ops.sequence_to_heads([q, k, v], team, tokens=tokens)
    assert [x.shape for x in by_head] == [(sum(tokens), 2, 8), (sum(tokens), 1, 8), (sum(tokens), 1, 8)]
    for x, back in zip((q, k, v), ops.heads_to_sequence(by_head, team, tokens=tokens), strict=True):
        assert torch.equal(back, x)


@pytest.mark.weft(world_size=2, schedules=1)
def test_gradients_go_back_where_the_elements_came_from(team):
    x, tokens = draw(team, (4, 1)[team.rank], 2, 3).requires_grad_(), (4, 1)
    ways = draw(team, 5, 1, 3, seed=1)
    (ops.sequence_to_heads(x, team, tokens=tokens) * ways).sum().backward()
    assert torch.equal(x.grad, ops.heads_to_sequence(ways, team, tokens=tokens))
    y = draw(team, 4, 1, 3, seed=2).requires_grad_()
    back = ops.heads_to_sequence([y, 2 * y], team)
    sum((one * back[0].detach()).sum() for one in back).backward()
    assert torch.equal(y.grad, 3 * y.detach())


def test_wrong_arguments_are_refused_in_one_line():
    def refuse(call, match, W=2):
        with pytest.raises(ValueError, match=match) as caught:
            weft.simulate(call, W)
        assert "\n" not in str(caught.value)

    x = torch.ones(4, 4, 8)
    refuse(
        lambda team: ops.sequence_to_heads(x[:, :1], team), r"sequence_to_heads: x has 1 heads, fewer than world_size=2"
    )
    refuse(
        lambda team: ops.sequence_to_heads([x, x[:, :3]], team),
        r"x\[1\] has 3 heads, which world_size=2 does not divide",
    )
    refuse(
        lambda team: ops.sequence_to_heads(x[0], team), r"x has shape \(4, 8\); it must be \[tokens, heads, head_dim\]"
    )
    refuse(lambda team: ops.sequence_to_heads([x, x.half()], team), "all have the same tokens and dtype")
    refuse(lambda team: ops.sequence_to_heads(x, team, tokens=(4,)), "are not the numbers of 2 ranks")
    refuse(lambda team: ops.sequence_to_heads(x, team, tokens=(4, -1)), r"tokens\[1\]=-1")
    refuse(lambda team: ops.sequence_to_heads(x, team, tokens=(3, 3)), "x has 4 tokens, and tokens=.* say 3 at rank")
    refuse(
        lambda team: ops.heads_to_sequence(x[:3], team),
        "x has 3 tokens, which world_size=2 does not divide; pass tokens=",
    )
    refuse(
        lambda team: ops.heads_to_sequence(x, team, algorithm="ring"), "algorithm='ring' is not one of 'auto', 'push'"
    )


@pytest.mark.triton_internals
@pytest.mark.parametrize("arch", sampled(((arch,) for arch in TARGETS), lambda arch: arch == "sm_90"))
def test_compiles(arch):
    """Tiles move 16 bytes a thread, through the transposition too, and no thread has a stack."""
    words, plan = torch.zeros(16, dtype=torch.int32), PushPlan(transport="keyed", row_bytes=4096, num_warps=8)
    parts = Part(words, words, 4096, 1024), Part(words, words, 4096, 128)
    for to_heads, many in ((True, 2), (False, 1)) if arch == "sm_90" else ((True, 1),):
        options = {"maxnreg": registers_of(plan, 4), "launch_pdl": arch in ("sm_90", "sm_100")}
        made = compiled(
            exchange_heads_kernel, parts[:many], words, 1000, words, words,
            a_view(), words, arch=arch, BLOCK=triton.next_power_of_2(plan.row_bytes // 4), ROWS=4, TRANSPORT="keyed",
            WIDTHS=(1024, 128)[:many], TO_HEADS=to_heads, EVEN=False, num_warps=plan.num_warps,
            **(options if arch.startswith("sm_") else {}),
        )  # fmt: skip
        if arch == "sm_90":
            ptx = made.asm["ptx"]
            assert re.search(r"st\.global\.v4\.b32", ptx) and re.search(r"ld\.global\.v4\.b32", ptx)
            assert ".local" not in ptx
            assert ptx.index("griddepcontrol.wait") < re.search(r"\b(ld|st)(\.\w+)*\.global", ptx).start()
