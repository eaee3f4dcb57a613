"""Programmatic dependent launch: consecutive kernels are checked as if they overlapped.

Single mistakes are in tests/zoo/overlapping.py.
"""

import collections

import pytest
import torch
import triton
import triton.language as tl

import weft.check
import weft.language as wl
from tests.zoo.overlapping import fill, sum_of
from weft import ops
from weft.check.detector.happens_before import HappensBefore
from weft.models import Qwen3Config, Qwen3ForCausalLM
from weft.simulator.machine.machine import Machine

pytestmark = pytest.mark.usefixtures("as_found")

N = 32
CONFIG = Qwen3Config.from_dict({
    "model_type": "qwen3", "vocab_size": 257, "hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "rms_norm_eps": 1e-6, "rope_theta": 50.0,
    "max_position_embeddings": 96, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
})  # fmt: skip


@pytest.fixture
def overlaps(monkeypatch):
    """Number of each kernel's launches that overlap the kernel before."""
    seen, launch = collections.Counter(), HappensBefore.launch

    def count(self, grid):
        launch(self, grid)
        order = self.orders[grid]
        seen[grid.launch.name] += order.early is not order.known

    monkeypatch.setattr(HappensBefore, "launch", count)
    return seen


def decode(team):
    """Two steps of two sequences in bf16 with weft's own kernels only."""
    model = Qwen3ForCausalLM(CONFIG, team, mode="gemm_ar", fused=True)
    generator = torch.Generator().manual_seed(team.rank)
    for weight in model.parameters():
        weight.data = (torch.randn(weight.shape, generator=generator) * 0.1).bfloat16()
    cache, table = model.new_cache(4, 16), torch.tensor([[1], [2]], dtype=torch.int32)
    steps = [(torch.tensor([3, 4]), torch.tensor([n, 5 + n])) for n in range(2)]
    return [model(tokens, model.decode_step(at, table, 16), cache) for tokens, at in steps]


def check(main, world_size=2, schedules=4, **options):
    return weft.check.check(main, world_size, schedules=schedules, **options)


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_decoding_step_relies_on_no_kernel_before_it_has_followed_it(overlaps, world_size):
    report = check(decode, world_size)
    assert report.ok, str(report)
    for kernel in ("decode_attention_kernel", "small_m_kernel", "vocab_embedding_kernel", "all_reduce_rms_norm_kernel"):
        assert overlaps[kernel] > 0, overlaps


def norm_by_what_has_just_been_made(team):
    """The previous kernel writes residual and weight, in the second round, once the workspace exists."""
    x = torch.full((2, N), float(team.rank + 1))
    for _ in range(2):
        made = ops.silu_mul(torch.ones(2, 2 * N))
        normed, _ = ops.all_reduce_rms_norm(x, made, made[0], 1e-6, team, factored=True)
    return normed.scaled


def test_a_norm_reads_its_weight_behind_the_kernel_before(overlaps):
    report = check(norm_by_what_has_just_been_made)
    assert report.ok, str(report)
    assert overlaps["all_reduce_rms_norm_kernel"] > 0


def sum_by_what_has_just_been_made(team):
    made = ops.silu_mul(torch.ones(2, 2 * N))
    return ops.add_rms_norm(torch.ones(2, N), made, made[0], 1e-6)


def test_a_norm_of_one_rank_reads_its_weight_behind_the_kernel_before(overlaps):
    report = check(sum_by_what_has_just_been_made, 1)
    assert report.ok, str(report)
    assert overlaps["add_rms_norm_kernel"] > 0


def test_kernels_that_never_follow_are_found(monkeypatch):
    monkeypatch.setattr(Machine, "wait_for_previous_kernel", lambda self: None)
    wrong = check(decode, schedules=1).wrong
    assert {found.finding.kind for found in wrong} == {"unfollowed"}
    assert {finding.kind for found in wrong for finding in found.also} == {"early-access"}


def in_a_row(between, *, launch_pdl=True):
    """Kinds of findings of ``sum_of``, which loads too early, after ``fill`` and ``between``."""

    def main(team):
        x, out = team.local((2, N), torch.float32), team.local(1, torch.float32)
        fill[(2,)](x, N, launch_pdl=True)
        between(team, x)
        sum_of[(1,)](out, x, N, True, launch_pdl=launch_pdl)
        return out

    return {found.finding.kind for found in check(main, 1, schedules=1).wrong}


@triton.jit
def unrelated(y):
    tl.store(y, 1.0)


def test_only_what_follows_directly_overlaps():
    assert in_a_row(lambda team, x: None) == {"early-access"}
    assert in_a_row(lambda team, x: None, launch_pdl=False) == set()
    assert in_a_row(lambda team, x: x.add_(1)) == set()  # torch's kernels do not overlap, and delay what follows
    assert in_a_row(lambda team, x: x.view(-1)) == {"early-access"}  # nothing ran
    assert in_a_row(lambda team, x: team.synchronize()) == set()
    assert in_a_row(lambda team, x: unrelated[(1,)](team.local(1, torch.float32))) == set()
    # After a kernel that follows the one before: later kernels know all that it has waited for.
    assert in_a_row(lambda team, x: ops.silu_mul(torch.zeros(1, 2 * N))) == set()


@triton.jit
def prefetching(out, x, weight, N: tl.constexpr):
    at = tl.arange(0, N)
    ahead = tl.load(weight + at)
    wl.wait_for_previous_kernel()
    wl.let_next_kernel_start()
    tl.store(out + at, ahead + tl.load(x + at))


@triton.jit
def by_triton_s_own_words(out, x, weight, N: tl.constexpr):
    at = tl.arange(0, N)
    ahead = tl.load(weight + at)
    tl.extra.cuda.gdc_wait()
    tl.extra.cuda.gdc_launch_dependents()
    tl.store(out + at, ahead + tl.load(x + at))


@pytest.mark.parametrize("kernel", [prefetching, by_triton_s_own_words])
def test_what_the_kernels_before_leave_alone_may_be_loaded_early(kernel, overlaps):
    def main(team):
        x, out, weight = (team.local(2 * N, torch.float32) for _ in range(3))
        for _ in range(3):
            fill[(2,)](x, N, launch_pdl=True)
            kernel[(1,)](out, x, weight, N, launch_pdl=True)
        return out

    report = check(main)
    assert report.ok, str(report)
    assert overlaps[kernel.__name__] > 0
