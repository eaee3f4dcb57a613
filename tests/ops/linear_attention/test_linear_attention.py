"""The ops of linear attention beyond their cases: pieces of a prompt, steps, undone tokens, bad inputs, planted mistakes."""

import pytest
import torch

import weft
from tests.ops.checking import assert_close, check, inputs_of, run_cases
from tests.ops.layer_cases import DEVICES, check_refused, everywhere, mutated, random
from weft import ops
from weft.ops.case import BF16, FP32, Case
from weft.ops.linear_attention import causal_conv1d, gated_delta_rule, recurrent_gated_delta_rule, rms_norm_gated
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


@pytest.mark.parametrize("device", DEVICES)
def test_steps_go_on_after_a_prompt_and_rejected_tokens_are_undone(device):
    """A step of three tokens, of which one is accepted, and another from there: as if the two had never been."""

    def run(device):
        x, gates = random((8, COLUMNS), FP32, device), gates_of(8, FP32, device)
        weight = random((COLUMNS, TAPS), FP32, device, 9)
        conv, state = x.new_zeros(5, TAPS - 1, COLUMNS), x.new_zeros(5, HEADS, K, V)
        every = ops.SequenceChunks.make([(0, 8)], [4]).to(x.device)
        whole = ops.gated_delta_rule(ops.causal_conv1d(x, weight, conv, every), gates, state, every)

        def step(rows, source, after):
            before = [5 + n + 1 for n in range(len(after))] if source == 0 else [6 + n + 1 for n in range(len(after))]
            lengths, slots = places(before, [source], x.device)
            targets = torch.tensor(after, dtype=torch.int32, device=x.device)
            mixed = ops.causal_conv1d_update(x[rows], weight, conv, lengths, slots, targets)
            return ops.recurrent_gated_delta_rule(mixed, rows_of(gates, rows), state, lengths, slots, targets)

        first = ops.SequenceChunks.make([(0, 5)], [0]).to(x.device)
        mixed = ops.causal_conv1d(x[:5], weight, conv, first)
        ops.gated_delta_rule(mixed, rows_of(gates, slice(0, 5)), state, first)
        wrong = torch.tensor([5, 0, 1], device=x.device)
        step(wrong, 0, [1, 2, 0])
        out = step(torch.tensor([6, 7], device=x.device), 1, [1, 2])
        assert_close(out, whole[6:].double(), 64 * K, what="after undone tokens")
        assert_close(state[2], state[4].double(), 64 * K, what="the state after it")
        assert_close(conv[2], conv[4].double(), 4, what="the convolution's state after it")

    everywhere(run, device)


def test_states_of_other_slots_and_of_padding_stay():
    def main(team):
        x, gates = random((3, COLUMNS), FP32, "cpu"), gates_of(3, FP32, "cpu")
        conv, state = torch.full((4, TAPS - 1, COLUMNS), 7.0), torch.full((4, HEADS, K, V), 7.0)
        lengths, slots = places([1, 0, 3], [1, 2, 3], "cpu")
        mixed = ops.causal_conv1d_update(x, random((COLUMNS, TAPS), FP32, "cpu"), conv, lengths, slots)
        ops.recurrent_gated_delta_rule(mixed, gates, state, lengths, slots)
        for one in (conv, state):
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


def test_wrong_arguments_of_convolutions_and_steps_are_refused():
    x, weight, state = torch.ones(4, 8), torch.ones(8, 4), torch.zeros(2, 3, 8)
    lengths, slots = places([1, 2, 3, 4], [0, 1], "cpu")
    update = ops.causal_conv1d_update
    check_refused(update, (x, torch.ones(8, 5), state, lengths, slots), "weight has K=5 columns, not 2 to 4")
    check_refused(update, (x, weight, torch.zeros(2, 4, 8), lengths, slots), "state has shape (2, 4, 8)")
    check_refused(update, (x, weight, state, lengths, slots), "after has shape (2,); it must be (4,)")
    check_refused(update, (x[:3], weight, state, lengths[:3], slots, lengths[:3]), "3 rows of 2 slots")
    normed = torch.ones(2, 2, 4), torch.ones(2, 8), torch.ones(3), 1e-6
    check_refused(ops.rms_norm_gated, normed, "weight has shape (3,); it must be (4,)")


DELTA, STEP = {"spans": ((0, 1), (5, 64), (0, 65))}, {"lengths": (9, 0)}
SLOW, CONV = {"spans": ((3, 150),), "kind": "slow"}, {"spans": ((0, 5), (3, 1), (70, 2), (0, 130))}
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
    ("no decay", recurrent_gated_delta_rule, "S *= tl.exp(g)", "S *= tl.exp(0 * g)", STEP),
    ("reads before the update", recurrent_gated_delta_rule, "delta = (v - tl.sum(S * k[:, None], 0))", "delta = v", STEP),
    ("keys of other heads", recurrent_gated_delta_rule, "head // (H // SIZES.key_heads)", "head % SIZES.key_heads", STEP),
    ("taps in reverse", causal_conv1d, "(TAPS - 1 - lag)", "lag", CONV),
    ("states not moved up", causal_conv1d, "old + (length + row)", "old + (0 * length + row)", CONV),
    ("two rows swapped", causal_conv1d, "three, two, one = two, one, token", "three, two, one = one, two, token", STEP),
    ("gate before the norm", rms_norm_gated, "value * value", "value * value * gates", {}),
]  # fmt: skip
SIZES = {
    "gated_delta_rule": (1, 2, 16, 16), "recurrent_gated_delta_rule": (2, 4, 16, 16, 2), "causal_conv1d": (32, 4),
    "causal_conv1d_update": (32, 4, 3), "rms_norm_gated": (7, 3, 128),
}  # fmt: skip


@pytest.mark.parametrize(("name", "module", "old", "new", "fields"), MISTAKES, ids=[one[0] for one in MISTAKES])
def test_a_planted_mistake_is_found(name, module, old, new, fields, tmp_path):
    """Each changes one line of a kernel; the case is right without it."""
    kind = module.__name__.rpartition(".")[2] + ("_update" if module is causal_conv1d and "lengths" in fields else "")
    case = Case(op=kind, world_size=1, dtype=FP32, sizes=SIZES[kind], fields=tuple(fields.items()))
    weft.simulate(run_cases, 1, args=([case], 1))
    mutant = mutated(module, old, new, f"mutant_of_{kind}", tmp_path)
    op = type(find_op(kind)).__name__

    def main(team):
        changed, inputs = getattr(mutant, op)(), inputs_of(case, 0)
        given = list(inputs)
        if kind == "rms_norm_gated":
            result = changed.forward(*given, 1e-6)
        else:
            given[-1] = given[-1].clone()
            given[1:-1] = [ops.Gates(*given[1:-1])] if "delta" in kind else given[1:-1]
            place = causal_conv1d.chunks_of(case) if case.field("spans") else causal_conv1d.step_of(case)
            result = changed.forward(*given, place), given[-1]
        check(case, 0, [inputs], result)

    with pytest.raises(AssertionError, match="wrong"):
        weft.simulate(main, 1)
