"""Arguments of a wrong type or value, for every public callable: one line with the argument, its value and the rule."""

from functools import partial

import numpy as np
import pytest
import torch

import weft
from tests.ops.vocab.test_adjust_logits import changes
from weft import SamplingParams, layers, ops
from weft.arguments import LONGEST, quoted, shortened
from weft.engine import EngineConfig, Runner
from weft.kernels.fp8 import E4M3, Fp8
from weft.models import Qwen3Config

LONG = "n" * 5000
NESTED = []
for _ in range(5000):
    NESTED = [NESTED]

# Values that no argument of a kind can have.
INT = ("4", 2.0, None, True, [1], LONG, NESTED, np.ones(2))
COUNT = (*INT, -1, 0)
OPTIONAL_COUNT = tuple(value for value in COUNT if value is not None)
FLAG = ("yes", 1, 0, None, LONG)
OPTIONAL_FLAG = ("yes", 1, 0, LONG)
NUMBER = ("0.5", None, [0.5], True, LONG, float("nan"))
OPTIONAL_NUMBER = tuple(value for value in NUMBER if value is not None)
TENSOR = (None, [1.0], "x", 5, np.ones((4, 8), np.float32), LONG)
TEAM = (None, "team", 5, torch.ones(4, 8), LONG)
CHOICE = (5, None, ["auto"], LONG)
HEAP = ("1", 1.5, True, -1, 0, 2**70, [1], LONG)
WORLD = ("4", 2.0, True, -1, 0, 10**9, [1], LONG)
CALLABLE = (5, "main", LONG, NESTED)
ARGS = (5, "ab", {1: 2}, LONG)
SHAPE = ("4", 2.0, None, True, -1, (2, -1), (2, "3"), (True,), [2.0], LONG, NESTED)
DTYPE = ("float32", 5, None, np.float32, LONG)
OPTIONAL_DTYPE = ("float32", 5, np.float32, torch.int32, LONG)


def refused(call, name, value, says=ValueError):
    with pytest.raises(says) as caught:
        call()
    message = str(caught.value)
    assert "\n" not in message, message
    assert len(message) < LONGEST + 700, message  # the longest lists the names of all ops
    assert name in message, f"{message!r} does not name {name}"
    if not isinstance(value, (tuple, list, dict)):
        assert quoted(value) in message, f"{message!r} does not quote {value!r}"


def each(table):
    return [(name, value) for name, values in table.items() for value in values]


def check_table(call, valid, table):
    for name, value in each(table):
        refused(lambda name=name, value=value: call(**{**valid, name: value}), name, value)


def nothing(team):
    return None


DOORS = {"main": CALLABLE, "args": ARGS, "heap_bytes": HEAP, "seed": ("1", 1.5, None, True)}


def test_doors_of_simulations():
    simulate = {
        **DOORS, "world_size": (*WORLD, None), "sms": OPTIONAL_COUNT, "like": CHOICE,
        "slow": (5, "x", {"0": 2}, {9: 2}, {0: "2"}, {0: -1.0}),
        "on_event": CALLABLE, "prepare": CALLABLE, "node_size": OPTIONAL_COUNT, "link": CHOICE,
    }  # fmt: skip
    check_table(weft.simulate, {"main": nothing, "world_size": 2}, simulate)
    launch = {
        **DOORS, "world_size": WORLD, "device": (*CHOICE, "tpu"), "debug": ("yes", None, -1, 0, float("nan"), LONG),
        "share_gpus": FLAG, "node_size": OPTIONAL_COUNT,
    }  # fmt: skip
    check_table(weft.launch, {"main": nothing, "device": "sim"}, launch)
    check = {
        **DOORS, "world_size": (*(v for v in WORLD if v != [1]), None, [], [2, 0], [2, "3"], [10**9]), "schedules": COUNT,
        "sms": OPTIONAL_COUNT, "like": CHOICE, "depth": COUNT, "strategy": CHOICE, "deterministic": FLAG, "script": (5, None),
        "progress": CALLABLE, "on_results": CALLABLE, "node_size": OPTIONAL_COUNT, "link": CHOICE,
    }  # fmt: skip
    check_table(weft.check, {"main": nothing, "world_size": 2}, check)


def test_methods_of_a_team():
    def main(team):
        x = team.zeros((4,))
        for make in (team.empty, team.zeros, lambda shape, dtype: team.local(shape, dtype)):
            check_table(make, {"shape": 4, "dtype": torch.float32}, {"shape": SHAPE, "dtype": DTYPE})
        check_table(team.signals, {"shape": 4}, {"shape": SHAPE, "name": (5, ["x"])})
        for method in (team.free, team.is_symmetric):
            check_table(method, {}, {"tensor": TENSOR})
        check_table(team.at_peer, {"tensor": x, "peer": 0}, {"tensor": TENSOR, "peer": (*INT, -1, 7)})
        check_table(team.workspace, {"key": "k", "make": dict}, {"key": ([],), "make": (5, None)})
        check_table(team.max_programs, {}, {"num_warps": COUNT, "registers": COUNT})
        check_table(
            team.subset, {"ranks": [0]}, {"ranks": (5, "0", None, [], ["0"], [0.0], [True], [7]), "heap_bytes": HEAP}
        )
        check_table(weft.Team.of, {}, {"group": (5, "tp", team), "heap_bytes": HEAP})
        check_table(
            weft.init,
            {},
            {
                "heap_bytes": HEAP,
                "debug": ("yes", None, -1, 0, float("inf")),
                "node_size": OPTIONAL_COUNT,
                "untested": FLAG,
            },
        )
        return True

    assert weft.simulate(main, 1) == [True]


def test_heap_bytes_that_this_machine_has_not():
    with pytest.raises(ValueError, match=r"heap_bytes=\d+: this machine has not so much memory for each of 2 virtual"):
        weft.simulate(nothing, 2, heap_bytes=1 << 46)


ENGINE = {
    "model": (5, True, ["x"], np.ones(2)),
    "mode": (*CHOICE, "fast"),
    "dtype": OPTIONAL_DTYPE,
    "fused": OPTIONAL_FLAG,
    "max_seq_len": OPTIONAL_COUNT,
    "max_batch": COUNT,
    "page_size": COUNT,
    "pages": (*OPTIONAL_COUNT, 1),
    "memory_fraction": (*NUMBER, 0, 2.0, -1),
    "chunk_tokens": COUNT,
    "mixed_chunk_tokens": COUNT,
    "prefix_caching": FLAG,
    "state_snapshot_bytes": (-1, 0.5, "x"),
    "state_snapshot_tokens": COUNT,
    "cuda_graph": FLAG,
    "warm_up": FLAG,
    "grammar_seconds": (*NUMBER, 0, -1.0, 3601),
    "speculative": (5, "x", [1]),
    "progress": CALLABLE,
}


def test_copies_and_layers():
    def main(team):
        x = team.zeros((4,), torch.float32)
        copies = {"dst": TENSOR, "src": TENSOR, "peer": (*INT, -1, 7)}
        for copy in (team.copy_engine.put, team.copy_engine.get):
            for name, value in each(copies):
                given = {"dst": x, "src": x, "peer": 0, name: value}
                refused(lambda copy=copy, given=given: copy(**given), "=", ())
        for collective in (team.library.all_reduce, team.library.all_gather, team.library.reduce_scatter):
            check_table(collective, {}, {"x": TENSOR})
        layer = {"team": team, "mode": "torch", "dtype": torch.float32}
        bad = {"team": TEAM, "mode": CHOICE, "dtype": DTYPE}
        sizes = {"hidden_size": 64, "intermediate_size": 64}
        check_table(layers.TPMLP, {**layer, **sizes}, {**bad, **dict.fromkeys(sizes, COUNT)})
        sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
        valid = {**layer, **sizes, "rms_norm_eps": 1e-6}
        check_table(layers.TPAttention, valid, {**bad, **dict.fromkeys(sizes, COUNT)})
        return True

    assert weft.simulate(main, 1) == [True]


def test_engines_and_runners():
    def main(team):
        check_table(
            weft.Engine,
            {"model": None, "team": team},
            {**ENGINE, "team": TEAM, "warn": FLAG, "warm_up_progress": CALLABLE},
        )
        engine = weft.Engine(None, team)
        sampling = {
            "max_tokens": OPTIONAL_COUNT, "temperature": (*OPTIONAL_NUMBER, -1.0), "top_p": (*OPTIONAL_NUMBER, 0.0, 2.0),
            "top_k": ("1", 1.5, True, -2, 2**70), "min_p": (*OPTIONAL_NUMBER, -0.1, 2.0),
            "seed": ("1", 1.5, True, -1, 2**70), "stop": (5, [""], [5]), "ignore_eos": FLAG,
            "prompts": (5, None, 2.5, [], [None], [2.5], [[True]], [["x"]], b"x", [NESTED], {"a": 1}),
        }  # fmt: skip
        check_table(engine.generate, {"prompts": "1+1="}, sampling)
        check_table(
            engine.submit, {"prompt": "1", "params": SamplingParams()}, {"prompt": (5, None), "params": (5, None)}
        )
        runner = {"model": (None, 5, "x", LONG), "config": (None, 5, {"pages": 2}, LONG)}
        check_table(Runner, {"model": engine.model, "config": engine.config}, runner)
        return True

    assert weft.simulate(main, 1) == [True]


def test_an_engine_config():
    options = {name: values for name, values in ENGINE.items() if name not in ("model", "progress")}
    check_table(EngineConfig, {}, {**options, "dtype": ("float32", 5, np.float32, LONG)})


def test_an_llm():
    valid = {"model": None, "world_size": 1, "device": "sim"}
    check_table(
        weft.LLM,
        valid,
        {**ENGINE, "warm_up_progress": CALLABLE, "world_size": WORLD, "device": (*CHOICE, "tpu"), "heap_bytes": HEAP},
    )
    refused(lambda: weft.LLM(LONG, 1, device="sim"), "no such directory", ())
    with weft.LLM(**valid) as llm:
        check_table(llm.generate, {"prompts": "1"}, {"prompts": (5, None, b"x", [2.5]), "params": (5, "x", {"a": 1})})
        check_table(llm.chat, {"messages": [{"role": "user"}]}, {"messages": (5, "x", [], LONG)})


def test_sampling_parameters():
    table = {
        "temperature": (*NUMBER, -1.0, float("inf")), "top_p": (*NUMBER, 0.0, 1.5), "max_tokens": OPTIONAL_COUNT,
        "top_k": ("1", 1.5, None, True, -2, 2**70), "min_p": (*NUMBER, -0.1, 1.5),
        "seed": ("1", 1.5, True, -1, 2**70), "stop": (5, [""], [5], NESTED), "ignore_eos": FLAG,
        "include_stop_str_in_output": FLAG, "skip_special_tokens": FLAG,
        "stop_token_ids": (5, "x", ["1"], [True], [-1], NESTED), "allowed_token_ids": (5, "x", [], ["1"], [-1], NESTED),
        "presence_penalty": (*NUMBER, -2.5, 2.5), "frequency_penalty": (*NUMBER, -2.5, 2.5),
        "repetition_penalty": (*NUMBER, 0, -1.0, float("inf")), "min_tokens": ("1", 1.5, None, True, -1, 65),
        "logit_bias": (5, [1], {"1": 1.0}, {-1: 1.0}, {1: 101.0}, {1: "x"}), "bad_words": (5, [""], [5], NESTED),
        "logprobs": ("1", 1.5, True, -1, 21), "prompt_logprobs": ("1", 1.5, True, -1, 21),
        "cache_salt": (5, "", ["x"], True, "\ud800"), "lora": (5, "", ["x"], True, "\ud800"),
    }  # fmt: skip
    check_table(SamplingParams, {}, table)


def test_names_of_models():
    check_table(Qwen3Config.named, {}, {"name": ()})
    for name in (None, 5, LONG):
        refused(lambda name=name: Qwen3Config.named(name), "model", name)


def operands(team):
    """Op, valid arguments, and for each argument the values that it refuses."""
    f = torch.ones
    x, ids, pages = f(4, 8), torch.zeros(4, dtype=torch.int64), torch.zeros((2, 4), dtype=torch.int32)
    cache, angles = f(4, 1, 16, 16), f(8, 16)
    team_and = {"team": TEAM, "algorithm": (*CHOICE, "ring")}
    for op in (ops.all_reduce, ops.all_gather, ops.reduce_scatter, ops.all_to_all):
        yield op, {"x": x, "team": team}, {"x": TENSOR, **team_and}
    yield ops.all_reduce, {"x": x, "team": team}, {"invariant": FLAG}
    yield ops.all_reduce, {"x": x, "team": team, "invariant": True}, {"algorithm": ("one_shot", "copy_engine")}
    norm = {"x": TENSOR, "residual": TENSOR, "weight": TENSOR, "eps": ("x", None, [1])}
    valid = {"x": x, "residual": x, "weight": f(8), "eps": 1e-6}
    yield ops.add_rms_norm, valid, norm | {"residual": TENSOR[1:], "invariant": FLAG}
    yield ops.all_reduce_rms_norm, {**valid, "team": team}, {**norm, **team_and, "factored": FLAG, "invariant": FLAG}
    matrices = {"a": TENSOR, "b": TENSOR}
    yield ops.matmul, {"a": x, "b": x}, {**matrices, "invariant": FLAG}
    yield ops.matmul, {"a": x, "b": x, "invariant": True}, matrices
    fp8 = {"a": x.half(), "b": Fp8(torch.zeros(4, 8).to(E4M3), f(4, 1)), "team": team}
    yield ops.matmul_reduce_scatter, fp8, {"a": TENSOR}
    yield ops.matmul_all_reduce, {"a": x, "b": x, "team": team}, {**matrices, "team": TEAM, "invariant": FLAG}
    yield ops.matmul_reduce_scatter, {"a": x, "b": x, "team": team}, {**matrices, "team": TEAM, "own_first": FLAG}
    sharded = {"a_shard": TENSOR, "b": TENSOR, "team": TEAM, "own_first": FLAG}
    yield ops.all_gather_matmul, {"a_shard": x, "b": x, "team": team}, sharded
    yield ops.barrier, {}, {"team": TEAM}
    yield ops.silu_mul, {}, {"gate_up": TENSOR}
    yield ops.sigmoid_mul, {"x": x, "gate": x}, {"x": TENSOR, "gate": TENSOR}
    adapters = {"A": f(2, 16, 16), "B": f(2, 16, 16), "scale": f(2), "ends": [16]}
    rows = {"y": f(4, 16), "x": f(4, 16), **adapters, "adapters": torch.zeros(4, dtype=torch.int32)}
    yield ops.add_adapters, rows, {**dict.fromkeys(rows, TENSOR), "ends": (None, 5, "x", [1.5], [])}
    yield ops.matmul_silu_mul, {"x": x, "weight": x}, {"x": TENSOR, "weight": TENSOR, "invariant": FLAG}
    yield (
        ops.vocab_embedding,
        {"tokens": ids, "weight": x, "first": 0},
        {"tokens": TENSOR, "weight": TENSOR, "first": (*INT, -1)},
    )
    logits = {"logits": TENSOR, "first": (*INT, -1), "temperature": TENSOR[1:], "seed": TENSOR[1:], "floor": TENSOR[1:]}
    drawn = {"temperature": f(4), "seed": ids, "position": ids}
    yield ops.sample_argmax, {"logits": x, "first": 0, **drawn}, logits
    yield ops.join_argmax, {}, {"pairs": TENSOR}
    slots = {"changes": changes(slots=4), "first": 0, "rows": ids, "position": ids}
    wrong = {"changes": (None, 5, "x", [x]), "first": (*INT, -1), "rows": TENSOR, "position": TENSOR}
    yield ops.adjust_logits, {"logits": x, **slots}, {"logits": TENSOR, **wrong, "guided": FLAG}
    yield ops.note_tokens, {"tokens": ids, **slots}, {"tokens": TENSOR, **wrong}
    history = {"history": torch.zeros(4, 8, dtype=torch.int32), "newest": ids, "positions": ids}
    lengths = {"drafts": (*COUNT, 17), "least": (*COUNT, 5), "most": (*COUNT, 17)}
    valid = {**history, "drafts": 2, "least": 1, "most": 4}
    yield ops.ngram_drafts, valid, {**dict.fromkeys(history, TENSOR), **lengths}
    rows = {"chosen": torch.zeros(4, 3, dtype=torch.int64), "rows": torch.zeros(4, 3, dtype=torch.int64)}
    written = {"newest": ids, "results": torch.zeros(4, 5, dtype=torch.int64)}
    yield ops.accept_drafts, {**rows, **written}, dict.fromkeys({**rows, **written}, TENSOR)
    drafted = {"first": ids, "last": ids, "newest": ids, "proposed": torch.zeros(4, 3, dtype=torch.int64)}
    yield ops.draft_rows, drafted, dict.fromkeys(drafted, TENSOR)
    places = {"positions": torch.zeros(2, dtype=torch.int64), "pages": pages, "page_size": 16, "tickets": 4}
    yield ops.decode_metadata, places, {
        "positions": TENSOR, "pages": TENSOR, "page_size": COUNT, "tickets": (*INT, -1), "queries": (*COUNT, 3),
    }  # fmt: skip
    above = {"logits": x, "best": f(4), "temperature": f(4), "low": torch.zeros(4, dtype=torch.int32), "shift": 24}
    yield (
        ops.top_p_mass,
        above,
        {**dict.fromkeys(("logits", "best", "temperature", "low"), TENSOR), "shift": (5, "x", None)},
    )
    shared = {"keys": cache, "values": cache, "pages": pages, "lengths": torch.ones(2, dtype=torch.int32)}
    number = ("x", [1])
    options = {"scale": number, "window": OPTIONAL_COUNT}
    few = {**dict.fromkeys(("q", *shared), TENSOR), **options, "queries": (*COUNT, 3)}
    yield ops.paged_attention, {"q": f(2, 1, 16), **shared}, few
    attended = {**dict.fromkeys(("q", *shared), TENSOR), **options, **team_and}
    yield ops.sharded_decode_attention, {"q": f(2, 1, 16), **shared, "team": team}, attended
    yield ops.merge_attention, {"outs": f(2, 2, 1, 16), "lses": f(2, 2, 1)}, {"outs": TENSOR, "lses": TENSOR}
    latents = {"cache": f(2, 16, 32), "pages": pages, "lengths": torch.ones(2, dtype=torch.int32)}
    wrong = {**dict.fromkeys(("q", "q_rope", *latents), TENSOR), "scale": number, "queries": (*COUNT, 3)}
    yield ops.mla_decode_attention, {"q": f(2, 1, 16), "q_rope": f(2, 1, 16), **latents, "scale": 0.2}, wrong
    tensors = {"q_rope": f(2, 1, 16), "kv": f(2, 32), "weight": f(16), "angles": angles, "positions": ids[:2]}
    tensors |= {"slots": ids[:2], "cache": f(2, 16, 32)}
    wrong = {**dict.fromkeys(tensors, TENSOR), "eps": number, "interleaved": FLAG}
    yield ops.mla_norm_rope, {**tensors, "eps": 1e-6}, wrong
    weights = {"q_weight": f(16), "k_weight": f(16), "eps": 1e-6, "angles": angles}
    tensors = dict.fromkeys(("qkv", "q_weight", "k_weight", "angles", *shared), TENSOR) | {"bias": TENSOR[1:]}
    yield ops.decode_attention, {"qkv": f(2, 48), **weights, **shared}, {**tensors, "eps": number, **options}
    yield ops.decode_attention, {"qkv": f(2, 48), **weights, **shared}, {"gate": TENSOR[1:]}
    slots = {"positions": ids[:2], "slots": ids[:2], "keys": cache, "values": cache}
    tensors = dict.fromkeys(("qkv", "q_weight", "k_weight", "angles", *slots), TENSOR) | {"bias": TENSOR[1:]}
    yield ops.qk_norm_rope, {"qkv": f(2, 48), **weights, **slots}, {**tensors, "eps": number, "with_keys": FLAG}
    spans = {"q": f(2, 1, 16), "keys": cache, "values": cache, "pages": pages[:1], "spans": [(0, 2)]}
    tensors = dict.fromkeys(("q", "keys", "values", "pages"), TENSOR)
    yield ops.paged_prefill_attention, spans, {**tensors, **options, "spans": (5, None, [5], ["x"], [(1.5, 2)])}
    lengths = (None, 5, "x", [], [-1], [3], [1.5], LONG)
    prompts = {"q": f(2, 1, 16), "k": f(2, 1, 16), "v": f(2, 1, 16), "shards": [2], "team": team}
    wrong = {"shards": lengths, "scale": number, "return_lse": FLAG, **team_and}
    yield ops.gathered_prefill_attention, prompts, {**dict.fromkeys(("q", "k", "v"), TENSOR), **wrong}
    for op in (ops.sequence_to_heads, ops.heads_to_sequence):
        wrong = {"x": TENSOR, "tokens": (5, "x", (), (3,), (-1,), (4.0,), LONG), **team_and}
        yield op, {"x": f(4, 2, 8), "team": team}, wrong
    yield ops.matmul_parts, {"x": x, "weight": x}, {"x": TENSOR, "weight": TENSOR}
    yield from operands_of_linear_attention()
    yield from operands_of_experts(team)


def operands_of_linear_attention():
    """``operands`` of the ops of weft.ops.linear_attention."""
    f, i = torch.ones, partial(torch.ones, dtype=torch.int32)
    prompts, gates = ops.SequenceChunks.make([(0, 2)], [0]), ops.Gates(f(2, 2), f(2, 2), f(2), f(2))
    wrong = dict.fromkeys(("x", "weight", "state", "qkv", "z", "conv"), TENSOR)
    wrong |= {
        "sequences": (None, 5, [(0, 2)], LONG, ops.SequenceChunks(None, None, None)),
        "gates": (None, 5, (1, 2), LONG), "norm": (None, 5, (1,), LONG, (None, 1e-6), (f(16), "x")),
        "kept": (None, 5, (1, 2), LONG, ops.DeltaSlots(None, None, None)),
        "tokens": (None, 5, (1, 2), LONG, ops.DeltaTokens(None, None), ops.DeltaTokens(i(2), i(2), 5)),
    }  # fmt: skip
    convolved = {"x": f(2, 8), "weight": f(8, 4), "state": f(2, 3, 8), "sequences": prompts}
    ruled = {"qkv": f(2, 64), "gates": gates, "state": f(2, 2, 16, 16), "sequences": prompts}
    kept = ops.DeltaSlots(f(2, 4, 64), f(2, 4, 4), f(2, 2, 16, 16))
    step = {"qkv": f(2, 64), "z": f(2, 32), "gates": gates, "conv": f(64, 4), "norm": (f(16), 1e-6)}
    step |= {"kept": kept, "tokens": ops.DeltaTokens(i(2), torch.arange(2, dtype=torch.int32))}
    for op, valid in ((ops.causal_conv1d, convolved), (ops.gated_delta_rule, ruled), (ops.gated_delta_net_step, step)):
        yield op, valid, {name: wrong[name] for name in valid}
    normed = {"x": f(2, 2, 4), "gate": f(2, 8), "weight": f(4), "eps": 1e-6}
    yield ops.rms_norm_gated, normed, {**dict.fromkeys(("x", "gate", "weight"), TENSOR), "eps": ("x", None, [1])}


def operands_of_experts(team):
    """``operands`` of the ops of weft.ops.moe."""
    x, ids = torch.ones(3, 8), torch.arange(2, dtype=torch.int32).repeat(3, 1)
    routing, experts = ops.Routing(ids, torch.ones(3, 2)), ops.Experts(4, 0, 4)
    scoring = {"scoring": CHOICE, "renormalize": FLAG, "scale": ("x", None), "bias": TENSOR[1:]}
    yield (
        ops.route,
        {"logits": x, "k": 2},
        {"logits": TENSOR, "k": COUNT, **scoring, "groups": COUNT, "group_limit": COUNT},
    )
    wrong = {"block": (8, "16", LONG), "start": (*INT, -1, 3), "tickets": TENSOR[1:]}
    yield ops.moe_schedule, {"ids": ids, "experts": experts}, {"ids": TENSOR, "experts": (4, None, LONG), **wrong}
    whole = {"x": x, "router": torch.ones(4, 8), "experts": experts, "k": 2}
    wrong = {
        **wrong,
        "x": TENSOR,
        "router": TENSOR,
        "experts": (4, None, LONG),
        "k": COUNT,
        "algorithm": CHOICE,
        **scoring,
    }
    yield ops.matmul_route_schedule, whole, {name: values for name, values in wrong.items() if name != "start"}
    schedule = ops.moe_schedule(ids, experts)
    grouped = {
        "x": TENSOR,
        "weight": TENSOR,
        "schedule": (None, 5, (1, 2), LONG),
        "scales": TENSOR[1:],
        "invariant": FLAG,
    }
    first = {"x": x, "weight": torch.ones(4, 4, 8), "schedule": schedule}
    yield ops.grouped_matmul_silu_mul, first, {**grouped, "fp8": ("group", 5, LONG)}
    rows = {"x": torch.ones(6, 8), "weight": torch.ones(4, 4, 8), "schedule": schedule}
    yield ops.grouped_matmul, rows, {**grouped, "gather": FLAG}
    summed = {"y": TENSOR, "routing": (None, ids, LONG), "experts": (4, None, LONG)}
    yield ops.moe_sum, {"y": torch.ones(6, 8), "routing": routing, "experts": experts}, summed
    normed = {"residual": torch.ones(3, 4), "norm": torch.ones(4), "eps": 1e-6, "team": team}
    yield (
        ops.grouped_matmul_all_reduce_rms_norm,
        {**rows, "routing": routing, "experts": experts, **normed},
        {
            **dict.fromkeys(("x", "weight", "residual", "norm"), TENSOR), **dict.fromkeys(("shared", "gate"), TENSOR[1:]),
            "schedule": grouped["schedule"], "routing": summed["routing"], "experts": summed["experts"],
            "eps": ("x", None, [1]), "team": TEAM, "factored": FLAG, "algorithm": (*CHOICE, "fused"),
        },
    )  # fmt: skip
    sizes = {"experts": COUNT, "max_tokens": (*COUNT, 2), "team": TEAM, "algorithm": (*CHOICE, "pull")}
    tokens = {"x": x, "routing": routing, "team": team, "experts": 4, "max_tokens": 3}
    wrong = {"routing": (None, ids, LONG), "dtype": (torch.float16, "fp8", 8, LONG)}
    yield ops.moe_dispatch, tokens, {"x": TENSOR, **wrong, **sizes}
    found = ops.moe_dispatch(**tokens)
    weights = (3, routing.weights.int(), routing.weights.to("meta"), routing.weights[:2])
    wrong = [found._replace(routing=routing._replace(weights=one)) for one in weights]
    wrong = (None, 5, LONG, found._replace(experts=None), *wrong)
    combined = {"dispatched": wrong, "tokens": (*INT, -1, 4), "team": TEAM, "algorithm": (*CHOICE, "pull")}
    given = {"y": torch.ones(6, 8), "dispatched": found, "tokens": 3, "team": team}
    yield ops.moe_combine, given, {"y": TENSOR, **combined}
    given = {
        "x": x,
        "routing": routing,
        "gate_up": torch.ones(4, 4, 8),
        "experts": experts,
        "team": team,
        "max_tokens": 3,
    }
    wrong = {"routing": (None, ids, LONG), "experts": (4, None, LONG), "max_tokens": (*COUNT, 2), "team": TEAM}
    wrong["algorithm"] = (*CHOICE, "pull")
    yield ops.all_gather_grouped_matmul_silu_mul, given, {"x": TENSOR, "gate_up": TENSOR, **wrong}
    given = {"h": torch.ones(6, 8), "down": torch.ones(4, 4, 8), "schedule": schedule, "dispatched": found, "tokens": 3}
    wrong = {"h": TENSOR, "down": TENSOR, "schedule": grouped["schedule"], **combined}
    yield ops.grouped_matmul_reduce_scatter, {**given, "team": team}, wrong


def test_ops():
    def main(team):
        seen = set()
        for op, valid, table in operands(team):
            seen.add(op.__name__)
            for name, value in each(table):
                # Errors of ops begin with the op's name; where an operand fits none, another may be named.
                refused(lambda op=op, valid=valid, n=name, v=value: op(**{**valid, n: v}), op.__name__, (), ValueError)
        return seen

    [seen] = weft.simulate(main, 1)
    assert seen == {name for name in ops.__all__ if name.islower()} - {"explain", "warm_up"}


def test_warm_up():
    def main(team):
        wrong = {"shapes": (5, None, "x", [5], [(1, 2)], [(1, 2, 0)], [(1, 2, "3")]), "dtype": DTYPE, "run": CALLABLE}
        check_table(partial(ops.warm_up, team), {}, {**wrong, "algorithm_cache": (5, b"x", True)})

    weft.simulate(main, 1)


def test_spans():
    valid = {"sequences": [(0, 2)], "group": 1, "dtype": torch.float32}
    wrong = {"sequences": (5, None, [5], ["x"], [(1.5, 2)]), "group": COUNT, "block_m": (0, 8)}
    check_table(ops.SequenceRanges.make, valid, wrong)


def test_explain():
    valid = {"op": "all_reduce", "shape": (16,), "world_size": 2}
    table = {"op": CHOICE, "dtype": DTYPE, "world_size": ("4", 2.0, True, 0), "caps": (5, "x"), "own_first": FLAG}
    check_table(ops.explain, valid, {**table, "shape": (5, ("4",), (-1,), LONG), "algorithm": CHOICE})


def test_long_values_are_shortened_and_odd_ones_named():
    assert len(shortened("a b " * 5000)) < LONGEST + 20
    assert quoted(10**5000) == "<int>" and quoted(NESTED) == "<list>"
    assert (
        quoted("a\nb") == r"'a\nb'" and quoted(torch.ones(2, 3)) == "<Tensor of shape (2, 3) and dtype torch.float32>"
    )
