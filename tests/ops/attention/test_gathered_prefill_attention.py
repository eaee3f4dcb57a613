"""gathered_prefill_attention: shards, log-sum-exp, arguments, calls in a row, and the code for GPUs."""

import functools
from dataclasses import replace

import pytest
import torch
import triton.language as tl

import weft
import weft.check
from tests.check.calls import Call, prefilled
from tests.compiling import SHARED, TARGETS, a_view, compiled
from tests.ops.layer_cases import mutated
from tests.sampled import sampled
from weft import ops
from weft.kernels.online_softmax import PrefillTile
from weft.kernels.paged_cache import CacheSizes, PagedCache
from weft.ops.attention import gathered_prefill_attention as module
from weft.ops.attention import pipelined_prefill
from weft.ops.attention.gathered_prefill_attention import (
    GATHERED_PREFILL_ATTENTION,
    Gathered,
    Pipelined,
    Ulysses,
)
from weft.ops.attention.stripes import Stripes, gathered_prefill_attention_kernel
from weft.plan.planned import machine
from weft.runtime.capabilities import Capabilities
from weft.runtime.team.channel import ChannelView


@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
@pytest.mark.parametrize("lengths", [(0,), (1,), (5, 0, 40), (64, 17)])
def test_shards_are_even_and_come_back(world_size, lengths):
    shards = ops.ZigzagShards(lengths=lengths, world_size=world_size)
    x = torch.arange(sum(lengths))
    parts = [shards.take(x, rank) for rank in range(world_size)]
    assert [len(part) for part in parts] == shards.tokens
    assert torch.equal(shards.join(torch.cat(parts)), x)
    # A rank's keys to attend to: those up to each token.
    position = torch.cat([torch.arange(length) for length in lengths])
    work = [int((shards.take(position, rank) + 1).sum()) for rank in range(world_size)]
    assert max(work) - min(work) <= 4 * max(lengths) * len(lengths)


def test_a_shard_of_one_sequence_has_the_stripes_of_the_picture():
    shards = ops.ZigzagShards(lengths=(8,), world_size=2)
    assert [shards.indices(rank).tolist() for rank in range(2)] == [[0, 1, 6, 7], [2, 3, 4, 5]]


def attended(team, lengths, algorithm, seed=0, dtype=torch.float32, return_lse=True):
    """(out, lse), and what they should be, of the rank's tokens."""
    shards = ops.ZigzagShards(lengths=lengths, world_size=team.size)
    generator = torch.Generator().manual_seed(seed)
    whole = [
        torch.randn(sum(lengths), h, 16, generator=generator).to(dtype) for h in (2 * team.size, team.size, team.size)
    ]
    mine = [shards.take(x, team.rank) for x in whole]
    found = ops.gathered_prefill_attention(*mine, list(lengths), team, return_lse=return_lse, algorithm=algorithm)
    q, k, v = (x.double() for x in whole)
    scores = q.transpose(0, 1) @ k.repeat_interleave(2, 1).permute(1, 2, 0) / 4
    sequence = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    at = torch.arange(sum(lengths))
    hidden = (sequence[:, None] != sequence) | (at > at[:, None])
    scores = scores.masked_fill(hidden, -torch.inf)
    out = (scores.softmax(-1) @ v.repeat_interleave(2, 1).transpose(0, 1)).transpose(0, 1)
    return found, (shards.take(out, team.rank), shards.take(scores.logsumexp(-1).T, team.rank))


@pytest.mark.parametrize("algorithm", ["gathered", "ulysses"])
def test_calls_of_any_lengths_in_a_row_and_their_log_sum_exp(algorithm):
    """Buffers grow and shrink from call to call, and a rank may be one call ahead."""

    def main(team):
        return [attended(team, lengths, algorithm, seed) for seed, lengths in enumerate([(9,), (30, 3), (1,), (0, 2)])]

    for results in weft.simulate(main, 2, seed=3):
        for (out, lse), (wanted, of_wanted) in results:
            assert out.is_contiguous() and out.shape == wanted.shape and lse.dtype == torch.float32
            torch.testing.assert_close(out.double(), wanted, rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(lse.double(), of_wanted, rtol=1e-5, atol=1e-5)


def test_cudnn_between_copies_in_calls_of_any_length():
    """Also of fewer tokens than stripes; parts of a row are rounded before they are merged."""

    def main(team):
        calls = enumerate((9, 30, 1, 2, 17))
        return [attended(team, (length,), "pipelined", seed, torch.float16) for seed, length in calls]

    for world_size in (1, 2, 3):
        first, again = (weft.simulate(main, world_size, seed=seed, slow={0: 30}) for seed in (3, 4))
        for results, others in zip(first, again, strict=True):
            for ((out, lse), (wanted, of_wanted)), ((other, _), _) in zip(results, others, strict=True):
                assert out.is_contiguous() and out.shape == wanted.shape and lse.dtype == torch.float32
                torch.testing.assert_close(out.double(), wanted, rtol=2e-3, atol=2e-3)
                torch.testing.assert_close(lse.double(), of_wanted, rtol=1e-3, atol=1e-3)
                assert torch.equal(out, other)


MUTANTS = {
    "a rank's keys are not awaited": ("await_chunk(channel.landed, 0, source)", "pass", "race"),
    "another rank's keys are awaited": ("landed, 0, source)", "landed, 0, (source + 1) % W)", "deadlock"),
    "the first stripe sees later keys": ("0 if source < me else first, len(q))", "0, len(q))", "wrong"),
    "the second stripe of a rank before is read": (
        "(0 if source < me else rows",
        "(0 if source == me else rows",
        "uninitialised",
    ),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_planted_bug_between_copies_is_found(name, tmp_path, monkeypatch):
    old, new, kind = MUTANTS[name]
    mutant = mutated(pipelined_prefill, old, new, f"pipelined_mutant_{list(MUTANTS).index(name)}", tmp_path)
    monkeypatch.setattr(module, "attend_between_copies", mutant.attend_between_copies)
    call = Call("pipelined", functools.partial(prefilled, algorithm="pipelined"), 2)
    report = weft.check.check(call, 3, schedules=4)
    found = {finding.kind for one in report.wrong for finding in (one.finding, *one.also)}

    if kind != "wrong":
        assert kind in found, found
        return

    def main(team):
        (out, _), (wanted, _) = attended(team, (31,), "pipelined", dtype=torch.float16)
        return bool((out.double() - wanted).abs().nan_to_num(9.0).max() < 2e-3)

    assert not all(weft.simulate(main, 3))


def test_wrong_arguments_are_refused_in_one_line():
    def refuse(match, q=(3, 4, 16), k=(3, 2, 16), shards=(6,), W=2, dtype=torch.float32, **options):
        def main(team):
            x = torch.ones(k, dtype=dtype)
            return ops.gathered_prefill_attention(torch.ones(q, dtype=dtype), x, x, list(shards), team, **options)

        with pytest.raises(ValueError, match=match) as caught:
            weft.simulate(main, W)
        assert "\n" not in str(caught.value)

    refuse(r"q has 3 tokens and rank [01] of shards 4; take them with ZigzagShards.take", shards=(8,))
    refuse("lengths.0.=-1", shards=(-1,))
    refuse("is no tuple of tokens of each sequence", shards=())
    refuse("q has 3 heads and k 2; each KV head must have", q=(3, 3, 16))
    refuse(r"k has shape \(2, 2, 16\); it must be \(3, Hkv, 16\)", k=(2, 2, 16))
    refuse("head_dim=24 is not one of", q=(3, 4, 24), k=(3, 2, 24))
    refuse(
        "k has 1 heads, which world_size=2 does not divide, and algorithm='ulysses'", k=(3, 1, 16), algorithm="ulysses"
    )
    refuse("algorithm='ring' is not one of 'auto', 'gathered', 'ulysses', 'pipelined'", algorithm="ring")
    refuse("algorithm='pipelined' does not take this call: cuDNN's attention is for fp16", algorithm="pipelined")
    half = {"dtype": torch.float16, "algorithm": "pipelined"}
    refuse("there are 2 sequences, and cuDNN is called for one; take 'gathered' or 'auto'", shards=(4, 2), **half)
    refuse("takes heads of up to 128 elements, not 256", q=(3, 4, 256), k=(3, 2, 256), **half)
    refuse("scale=0 is not positive", scale=0)

    def of_another_rank(team):
        made = ops.ZigzagRanges.make([6], 1 - team.rank, 2, 2, torch.float32)
        x = torch.ones(3, 2, 16)
        return ops.gathered_prefill_attention(torch.ones(3, 4, 16), x, x, made, team)

    with pytest.raises(ValueError, match="make them for it"):
        weft.simulate(of_another_rank, 2)

    def in_other_memory(team):
        made = ops.ZigzagRanges.make([6], team.rank, 2, 2, torch.float32)
        x = torch.ones(3, 2, 16)
        made = replace(made, stripes=made.stripes.to("meta"))
        return ops.gathered_prefill_attention(torch.ones(3, 4, 16), x, x, made, team)

    with pytest.raises(ValueError, match="shards.stripes is on meta, not on cpu; move it"):
        weft.simulate(in_other_memory, 2)

    def with_gradient(team):
        x = torch.ones(3, 2, 16).requires_grad_()
        ops.gathered_prefill_attention(x, x, x, [6], team).sum().backward()

    with pytest.raises(RuntimeError, match="weft.ops.gathered_prefill_attention has no backward"):
        weft.simulate(with_gradient, 2)


def test_plans():
    op, caps = (
        GATHERED_PREFILL_ATTENTION,
        Capabilities(device_name="GPU", arch="sm_90", sms=132, memory_bytes=0, peer_access=(True,) * 4),
    )

    def planned(tokens, kv_heads, W, q_heads=32, caps=caps, **fields):
        call = op.call_of((tokens, q_heads, kv_heads, 128), torch.bfloat16, machine(caps, W))
        return op.plan(call._replace(**fields), machine(caps, W)).design

    assert isinstance(planned(2048, 8, 8), Ulysses) and isinstance(planned(2048, 4, 8), Gathered)
    assert isinstance(planned(1000, 4, 4), Gathered) and isinstance(planned(4096, 8, 8), Gathered)
    assert isinstance(planned(2048, 4, 2), Gathered)
    assert isinstance(planned(1 << 17, 4, 2), Pipelined) and isinstance(planned(8192, 4, 2), Pipelined)
    for other in ({"sequences": 3}, {"dtype": torch.float32}, {"head_dim": 256}):
        assert planned(1 << 17, 4, 2, **other).chunks == 8
    assert planned(16384, 4, 4, q_heads=16).chunks == 2
    assert isinstance(planned(1 << 17, 4, 2, caps=replace(caps, arch="gfx942")), Gathered)


@pytest.mark.triton_internals
@pytest.mark.parametrize("arch", sampled(((arch,) for arch in TARGETS), lambda arch: arch == "sm_90"))
def test_compiles(arch):
    """Keys and values come 16 bytes a thread by asynchronous copies, and tensor cores multiply."""
    x, words = torch.zeros(16, dtype=torch.bfloat16), torch.zeros(16, dtype=torch.int32)
    cache = PagedCache(x, x)
    keys, landed = Stripes(cache, cache, words, 3, 4096, 512), ChannelView(words, words, tl.constexpr(8))
    made = compiled(
        gathered_prefill_attention_kernel, x, keys, x, torch.zeros(16), words, words, landed, 0.1, a_view(), arch=arch,
        SIZES=CacheSizes(4, 0, 64), TILE=PrefillTile(8, 64, 64), GATHERED=True, WITH_LSE=True, num_warps=4,
        num_stages=2, **({"launch_pdl": True} if arch in ("sm_90", "sm_100") else {}),
    )  # fmt: skip
    assert made.metadata.shared <= SHARED[arch]
    if arch == "sm_90":
        ptx = made.asm["ptx"]
        assert "cp.async.cg.shared.global" in ptx and "wgmma.mma_async" in ptx
        assert "cp.async.ca" not in ptx and ".local" not in ptx
