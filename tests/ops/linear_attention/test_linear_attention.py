"""The ops of linear attention beyond their cases: pieces of a prompt, steps, undone tokens, bad inputs, planted mistakes."""

import pytest
import torch

import weft
from tests.ops.checking import assert_close, check, inputs_of, run_cases
from tests.ops.layer_cases import DEVICES, check_refused, everywhere, mutated, random
from weft import ops
from weft.kernels.fp8 import Fp8, RowFormat
from weft.ops.case import BF16, FP32, Case, agreed
from weft.ops.linear_attention import causal_conv1d, gated_delta_net_step, gated_delta_rule, rms_norm_gated
from weft.ops.op import find_op

KEY_HEADS, HEADS, K, V, TAPS = 1, 2, 16, 32, 4
COLUMNS = 2 * KEY_HEADS * K + HEADS * V


def gates_of(tokens, dtype, device, seed=5):
    a, b = (random((tokens, HEADS), dtype, device, seed + i) for i in range(2))
    return ops.Gates(a, b, *(random((HEADS,), FP32, device, seed + i) for i in (2, 3)))


def rows_of(gates, rows):
    return gates._replace(a=gates.a[rows], b=gates.b[rows])


def places(lengths, slots, device):
    return (torch.tensor(x, dtype=torch.int32, device=device) for x in (lengths, slots))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("cut", [1, 63, 64, 65, 129])
def test_a_prompt_in_two_pieces_is_a_prompt_in_one(cut, dtype, device):
    """Chunks of the second piece begin elsewhere, and its state comes from memory."""

    def run(device):
        length = 130
        x, gates = random((length, COLUMNS), dtype, device), gates_of(length, dtype, device)
        weight = random((COLUMNS, TAPS), dtype, device, 9)

        def pieces(*spans):
            conv, state = x.new_full((2, TAPS - 1, COLUMNS), 7), x.new_full((2, HEADS, K, V), 7, dtype=FP32)
            outs = []
            for before, count in spans:
                rows, chunks = (
                    slice(before, before + count),
                    ops.SequenceChunks.make([(before, count)], [1]).to(x.device),
                )
                mixed = ops.causal_conv1d(x[rows], weight, conv, chunks)
                outs.append(ops.gated_delta_rule(mixed, rows_of(gates, rows), state, chunks))
            assert (state[0] == 7).all() and (conv[0] == 7).all()
            return torch.cat(outs), state[1].to(dtype), conv[1]

        for one, two in zip(pieces((0, length)), pieces((0, cut), (cut, length - cut)), strict=True):
            assert_close(two, one.double(), 64 * 64 * K, partials=4, levels=8, what="two pieces")

    everywhere(run, device)


def kept_by(slots, ring, dtype, device, fill=0.0):
    """States in which nothing is kept."""
    shapes = (slots, ring, COLUMNS), (slots, ring, 2 * HEADS)
    parts = [torch.full(shape, fill, dtype=dtype, device=device) for shape in shapes]
    return ops.DeltaSlots(*parts, torch.full((slots, HEADS, K, V), fill, device=device))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("accepted", [0, 1, 2])
@pytest.mark.parametrize("length", [0, 2, 5])
def test_steps_go_on_after_a_prompt_and_rejected_tokens_are_left_out(length, accepted, device):
    """A step of a token and two drafts, of which some are accepted, and more steps from there: as if the rest had never been.

    Steps are of three, one and two tokens; the ring is as small as it may be.
    """

    def run(device):
        total = length + 1 + accepted + 1 + 2
        x, gates = random((total, COLUMNS), FP32, device), gates_of(total, FP32, device)
        z, weight = random((total, HEADS * V), FP32, device, 8), random((COLUMNS, TAPS), FP32, device, 9)
        norm = random((V,), FP32, device, 10), 1e-6
        kept = kept_by(3, TAPS - 1 + 3 + 2, FP32, device, fill=7.0)

        def prompt(count, slot):
            chunks, rows = ops.SequenceChunks.make([(0, count)], [slot]).to(x.device), slice(0, count)
            mixed = ops.causal_conv1d(x[rows], weight, kept.inputs, chunks)
            out = ops.gated_delta_rule(mixed, rows_of(gates, rows), kept.state, chunks)
            return ops.rms_norm_gated(out, z[rows], *norm).flatten(1)

        def step(rows, before, pending):
            rows = torch.tensor(rows, device=x.device)
            lengths, slots = places([before + n + 1 for n in range(len(rows))], [1], x.device)
            tokens = ops.DeltaTokens(lengths, slots, torch.tensor([pending], dtype=torch.int32, device=x.device), 2)
            return ops.gated_delta_net_step(x[rows], z[rows], rows_of(gates, rows), weight, norm, kept, tokens)

        whole = prompt(total, 2)
        if length:
            prompt(length, 1)
        drafts = [length + 1 + n if n < accepted else 0 for n in range(2)]
        outs = [step([length, *drafts], length, 0)[: 1 + accepted]]
        now = length + 1 + accepted
        outs.append(step([now], now, accepted))
        outs.append(step([now + 1, now + 2], now + 1, 0))
        assert_close(torch.cat(outs), whole[length:].double(), 64 * K, what="after rejected tokens")
        assert (kept.state[0] == 7).all() and (kept.inputs[0] == 7).all() and (kept.rates[0] == 7).all()

    everywhere(run, device)


def test_states_of_other_slots_and_of_padding_stay():
    def main(team):
        x, gates, kept = random((3, COLUMNS), FP32, "cpu"), gates_of(3, FP32, "cpu"), kept_by(4, 4, FP32, "cpu", 7.0)
        z, weight, norm = torch.ones(3, HEADS * V), random((COLUMNS, TAPS), FP32, "cpu"), (torch.ones(V), 1e-6)
        tokens = ops.DeltaTokens(*places([1, 0, 3], [1, 2, 3], "cpu"))
        ops.gated_delta_net_step(x, z, gates, weight, norm, kept, tokens)
        for one in kept:
            assert (one[[0, 2]] == 7).all() and (one[[1, 3]] != 7).any()

    weft.simulate(main, 1)


BAD_CHUNKS = [
    ("sequences=[(0, 1.5)] are not all (before, length)", [(0, 1.5)], [0]),
    ("sequences=[(-1, 2)] are not all", [(-1, 2)], [0]),
    ("slots=[0, 0] are not 2 different integers", [(0, 1), (0, 1)], [0, 0]),
    ("slots=[0] are not 2 different", [(0, 1), (0, 1)], [0]),
    ("slots=[-1] are not 1 different", [(0, 1)], [-1]),
]


@pytest.mark.parametrize(("message", "spans", "slots"), BAD_CHUNKS)
def test_wrong_chunks_are_refused(message, spans, slots):
    check_refused(ops.SequenceChunks.make, (spans, slots), message)


def delta_arguments():
    x, gates = torch.ones(3, COLUMNS), gates_of(3, FP32, "cpu")
    return x, gates, torch.zeros(2, HEADS, K, V), ops.SequenceChunks.make([(0, 3)], [0])


@pytest.mark.parametrize(
    ("message", "change"),
    [
        ("qkv has 95 columns; 2 value heads of 32", {0: torch.ones(3, COLUMNS - 1)}),
        ("pass rows [tokens, columns]", {0: torch.ones(COLUMNS, 3).T}),
        ("state.dtype=torch.float16 is not one of float32", {2: torch.zeros(2, HEADS, K, V).half()}),
        ("state has heads of 16 x 24; kernels take 16, 32", {2: torch.zeros(2, HEADS, K, 24)}),
        ("it is written in place, so pass it contiguous", {2: torch.zeros(2, HEADS, V, K).transpose(2, 3)}),
        ("gates=5 are not Gates", {1: 5}),
        ("gates.a has shape (2, 2); it must be (3, 2)", {1: gates_of(2, FP32, "cpu")}),
        ("gates.a.dtype=torch.bfloat16", {1: gates_of(3, BF16, "cpu")}),
        ("sequences=[(0, 3)] are not SequenceChunks", {3: [(0, 3)]}),
    ],
)
def test_wrong_arguments_of_the_delta_rule_are_refused(message, change):
    check_refused(ops.gated_delta_rule, [change.get(at, one) for at, one in enumerate(delta_arguments())], message)


def test_wrong_arguments_of_convolutions_and_norms_are_refused():
    x, weight, state, chunks = (
        torch.ones(4, 8),
        torch.ones(8, 4),
        torch.zeros(2, 3, 8),
        ops.SequenceChunks.make([(0, 4)], [0]),
    )
    conv = ops.causal_conv1d
    check_refused(conv, (x, torch.ones(8, 5), state, chunks), "weight has K=5 columns, not 2 to 4")
    check_refused(conv, (x, weight, torch.zeros(2, 3, 7), chunks), "state has shape (2, 3, 7)")
    check_refused(conv, (x, weight, torch.zeros(2, 2, 8), chunks), "state has 2 rows of a sequence")
    normed = torch.ones(2, 2, 4), torch.ones(2, 8), torch.ones(3), 1e-6
    check_refused(ops.rms_norm_gated, normed, "weight has shape (3,); it must be (4,)")


def step_arguments():
    x, z, gates, kept = (
        torch.ones(4, COLUMNS),
        torch.ones(4, HEADS * V),
        gates_of(4, FP32, "cpu"),
        kept_by(3, 7, FP32, "cpu"),
    )
    tokens = ops.DeltaTokens(*places([1, 2, 3, 4], [0, 1], "cpu"))
    return x, z, gates, torch.ones(COLUMNS, TAPS), (torch.ones(V), 1e-6), kept, tokens


def with_pending(pending, most, first=9):
    lengths, slots = places([first, first + 1, first, first + 1], [0, 1], "cpu")
    return ops.DeltaTokens(lengths, slots, torch.tensor(pending, dtype=torch.int32), most)


@pytest.mark.parametrize(
    ("message", "change"),
    [
        ("z has shape (4, 63); it must be (4, 64)", {1: torch.ones(4, HEADS * V - 1)}),
        ("weight has K=5 columns, not 2 to 4", {3: torch.ones(COLUMNS, 5)}),
        ("norm=3 is not (weight, eps)", {4: 3}),
        ("norm[0] has shape (3,); it must be (32,)", {4: (torch.ones(3), 1e-6)}),
        ("kept=5 are not DeltaSlots", {5: 5}),
        (
            "kept.inputs has 4 rows of a sequence; 2 new tokens, most_pending=0 and a convolution over 4 need 5",
            {5: kept_by(3, 4, FP32, "cpu")},
        ),
        (
            "kept.rates has shape (3, 9, 4); it must be (3, 7, 4)",
            {5: step_arguments()[5]._replace(rates=torch.zeros(3, 9, 4))},
        ),
        ("tokens=5 are not DeltaTokens", {6: 5}),
        ("tokens.lengths has shape (3,); it must be (4,)", {6: ops.DeltaTokens(*places([1, 2, 3], [0, 1], "cpu"))}),
        ("4 rows of 3 slots", {6: ops.DeltaTokens(*places([1, 2, 3, 4], [0, 1, 2], "cpu"))}),
        ("65536 sequences, and a launch has 65535", {6: ops.DeltaTokens(*places([1, 2, 3, 4], [0] * 65536, "cpu"))}),
        (
            "tokens.pending.dtype=torch.int64",
            {6: step_arguments()[6]._replace(pending=torch.zeros(2, dtype=torch.int64))},
        ),
    ],
)
def test_wrong_arguments_of_steps_are_refused(message, change):
    arguments = [change.get(at, one) for at, one in enumerate(step_arguments())]
    check_refused(ops.gated_delta_net_step, arguments, message)


DELTA, STEP = {"spans": ((0, 1), (5, 64), (0, 65))}, {"lengths": ((9, 1), (0, 0)), "ring": 6}
SLOW, CONV = {"spans": ((3, 150),), "kind": "slow"}, {"spans": ((0, 5), (3, 1), (70, 2), (0, 130)), "ring": 7}
MISTAKES = [
    ("updates in reverse", gated_delta_rule, "(total - G)", "(G - total)", DELTA),
    ("no state before", gated_delta_rule, "+ 2) > 0, S, 0.0)", "+ 2) < 0, S, 0.0)", DELTA),
    ("old states of new sequences", gated_delta_rule, "+ 2) > 0, S, 0.0)", "+ 2) >= 0, S, 0.0)", DELTA),
    ("a token does not see itself", gated_delta_rule, "at[:, None] >= at[None, :], G", "at[:, None] > at[None, :], G", DELTA),
    ("blocks apart", gated_delta_rule, "range(1, LEVELS)", "range(1, LEVELS - 1)", SLOW),
    ("pairs apart", gated_delta_rule, "row // 2 == column // 2", "row == column", DELTA),
    ("the blocks below not inverted", gated_delta_rule, "CD = tl.dot(C, rounded,", "CD = tl.dot(C, C,", DELTA),
    ("the first chunk's decay", gated_delta_rule, "factors + kept + after * H)", "factors + kept)", {"spans": ((7, 130),)}),
    ("chunks of the sequence before", gated_delta_rule, "place_of_chunk = number +", "place_of_chunk =", DELTA),
    ("no state for outputs", gated_delta_rule, "of_key[None, :]), read)", "of_key[None, :]), read * 0)", DELTA),
    ("no decay", gated_delta_net_step, "S *= tl.exp(-rate", "S *= tl.exp(0 * rate", STEP),
    ("reads before the update", gated_delta_net_step, "sum_over_keys(S * k)", "0 * v", STEP),
    ("keys of other heads", gated_delta_net_step, "= head // (H // SIZES.key_heads)", "= head % SIZES.key_heads", STEP),
    ("no pending tokens", gated_delta_net_step, "before > 0, tl.load(tokens", "before < 0, tl.load(tokens", STEP),
    ("a state with drafts", gated_delta_net_step, "if token == pending:", "if token >= pending:", STEP),
    ("inputs of another place", gated_delta_net_step, "store(inputs + at %", "store(inputs + (at + 1) %", STEP),
    ("rates of another token", gated_delta_net_step, "rates + (before - pending +", "rates + (before +", STEP),
    ("the row before", gated_delta_net_step, "v = tl.load(mixed + token", "v = tl.load(mixed + 0 * token", STEP),
    ("lags of steps in reverse", gated_delta_net_step, "(TAPS - 1 - lag)", "lag", STEP),
    ("taps in reverse", causal_conv1d, "(TAPS - 1 - lag)", "lag", CONV),
    ("rows kept elsewhere", causal_conv1d, "old + (before + last) % RING", "old + last % RING", CONV),
    ("gate before the norm", rms_norm_gated, "value * value", "value * value * gates", {}),
]  # fmt: skip
SIZES = {
    "gated_delta_rule": (1, 2, 16, 16), "gated_delta_net_step": (2, 4, 16, 16, 4, 2), "causal_conv1d": (32, 4),
    "rms_norm_gated": (7, 3, 128),
}  # fmt: skip


@pytest.mark.parametrize(("name", "module", "old", "new", "fields"), MISTAKES, ids=[one[0] for one in MISTAKES])
def test_a_planted_mistake_is_found(name, module, old, new, fields, tmp_path):
    """Each changes one line of a kernel; the case is right without it."""
    kind = module.__name__.rpartition(".")[2]
    case = Case(op=kind, world_size=1, dtype=FP32, sizes=SIZES[kind], fields=tuple(fields.items()))
    weft.simulate(run_cases, 1, args=([case], 1))
    mutant = mutated(module, old, new, f"mutant_of_{kind}", tmp_path)
    op = type(find_op(kind)).__name__

    def main(team):
        changed, inputs = getattr(mutant, op)(), inputs_of(case, 0)
        given = list(inputs)
        if kind == "rms_norm_gated":
            result = changed.forward(*given, 1e-6)
        elif kind == "gated_delta_net_step":
            kept, (qkv, z, *gates, conv, norm) = mutant.DeltaSlots(*(x.clone() for x in given[8:])), given[:8]
            arguments = qkv, z, ops.Gates(*gates), conv, norm, 1e-6, kept, mutant.tokens_of(case)
            result = changed.forward(mutant.StepArguments(*arguments)), *kept
        else:
            given[-1] = given[-1].clone()
            given[1:-1] = [ops.Gates(*given[1:-1])] if "delta" in kind else given[1:-1]
            result = changed.forward(*given, causal_conv1d.chunks_of(case)), given[-1]
        check(case, 0, [inputs], result)

    with pytest.raises(AssertionError, match="wrong"):
        weft.simulate(main, 1)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("row * fp8.row + head * fp8.column", "row * fp8.row"),
        ("row * fp8.row + head * fp8.column", "begin * fp8.row + head * fp8.column"),
        ("size = tl.abs(gated.to(", "size = tl.abs(normed.to("),
        ("scale_for(tl.max(tl.max(", "scale_for(tl.min(tl.max("),
    ],
)
def test_a_planted_mistake_of_rows_in_fp8_is_found(old, new, tmp_path):
    """Other scales than those of the heads, or in another place; rows equal rounded rows of 16 bits without it."""
    fields = ("ring", 9), ("lengths", ((5, 2), (0, 0))), ("fp8_rows", "group")
    case = Case(op="gated_delta_net_step", world_size=1, dtype=BF16, sizes=(2, 4, 16, 128, 4, 3), fields=fields)
    weft.simulate(run_cases, 1, args=([case], 1))
    mutant = mutated(gated_delta_net_step, old, new, "mutant_of_rows_in_fp8", tmp_path)

    def main(team):
        qkv, z, *gates, conv, norm = inputs_of(case, 0)[:8]
        outs = []
        for format in (None, RowFormat("group")):
            kept = mutant.DeltaSlots(*(x.clone() for x in inputs_of(case, 0)[8:]))
            arguments = qkv, z, ops.Gates(*gates), conv, norm, 1e-6, kept, mutant.tokens_of(case)
            outs.append(mutant.GATED_DELTA_NET_STEP.run(mutant.StepArguments(*arguments), format))
        new = mutant.tokens_of(case).lengths > 0
        plain, (rows, scales) = outs
        return agreed(plain[new], Fp8(rows[new], scales[new]), RowFormat("group")).isfinite().all().item()

    assert weft.simulate(main, 1) == [False]


@pytest.mark.parametrize("declared", [True, False])
def test_programs_of_a_step_do_not_overwrite_what_others_read(declared, monkeypatch):
    """Two heads share a key head, whose program keeps its inputs. Planted: a ring without room for the pending token."""
    if not declared:
        monkeypatch.delattr(gated_delta_net_step.GatedDeltaNetStep, "examine")

    def main(team):
        for _ in range(2):
            kept = kept_by(2, 7 if declared else 6, FP32, "cpu")
            ops.gated_delta_net_step(*step_arguments()[:5], kept, with_pending([2, 0], 2 if declared else 1))

    report = weft.check.check(main, 1, schedules=4)
    assert report.ok == declared, str(report)


@pytest.mark.parametrize("name", ["causal_conv1d_update", "recurrent_gated_delta_rule"])
def test_a_name_that_is_gone_says_what_to_call(name):
    with pytest.raises(AttributeError, match=f"weft.ops.{name} is gone; call weft.ops.gated_delta_net_step"):
        getattr(ops, name)
    with pytest.raises(ImportError, match=f"^weft.ops.{name} is gone; call weft.ops.gated_delta_net_step"):
        exec(f"from weft.ops import {name}")
    assert not hasattr(ops, name)
