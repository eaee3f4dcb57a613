"""Checkpoints in fp8 are what a plain-torch model of their format computes, on all numbers of ranks, in every recipe."""

import copy
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

import weft
from tests.against_transformers import FAMILIES, prompt, reference_greedy, reference_logits, relative_rms
from tests.fp8_checkpoints import CONFIGS, reference, write
from tests.models.test_adapters import ATTENTION, MLP, make_adapter
from tests.quantized_checkpoints import answers, check_cut, heads_of, made_once, matrices_of
from tests.sampled import sampled
from tests.teacher_forced import all_logits
from weft.models import Decoder
from weft.models.checkpoint import Checkpoint
from weft.parallel import quantized

# An input near the middle of two e4m3 numbers falls to either side by the order of a sum: 1 in 10^5, by 1/16. Then this row of
# logits and later ones of its sequence differ by percents, others by the order of sums alone.
TOLERANCE, MOST = 1e-3, 0.05
# Matrices with whole blocks and with ragged ones; heads that W cuts into parts of a block.
SIZES = {
    "hidden_size": 192,
    "intermediate_size": 384,
    "head_dim": 32,
    "num_hidden_layers": 2,
    "initializer_range": 0.06,
}


@pytest.fixture(scope="session")
def in_fp8(make_checkpoint, tmp_path_factory):
    return made_once(make_checkpoint, tmp_path_factory, SIZES, write)


def check(made, name, mode, world_size, *, batch=2, steps=12, fused=False, expert_ranks=1, seed=0, **options):
    directory, *_, model, tensors = made
    expected = reference(model, tensors, name, world_size, expert_ranks)
    tokens = prompt(batch, 9, seed)
    logits, ids = reference_logits(expected, tokens), reference_greedy(expected, tokens, steps)
    assert row_errors(reference_logits(model, tokens), logits).min() > 8 * TOLERANCE  # what rounding to fp8 itself does
    arguments = (directory, mode, tokens, steps, fused, options)
    for answered, generated in weft.simulate(answers, world_size, args=arguments):
        errors = row_errors(answered, logits)
        assert errors.median() <= TOLERANCE
        assert errors.max() <= MOST
        for prompted, sequence, wanted in zip(tokens, generated.T, ids, strict=True):
            check_greedy(expected, prompted, sequence, wanted)


def row_errors(logits, expected):
    """Relative error of each row of logits, by root mean squares."""
    return ((logits - expected).square().mean(-1) / expected.square().mean(-1)).sqrt()


def check_greedy(expected, prompted, generated, wanted):
    """The first token that differs is as likely to the plain model as its own, up to an input's rounding."""
    differs = (generated != wanted).nonzero().flatten().tolist()
    if differs:
        sequence = torch.cat([prompted, wanted[: differs[0]].to(prompted)])
        last = reference_logits(expected, sequence[None])[0, -1]
        assert last.max() - last[generated[differs[0]]] <= MOST * last.square().mean().sqrt()


@pytest.mark.parametrize("name", CONFIGS)
def test_every_format_is_its_plain_model(in_fp8, name):
    check(in_fp8(name), name, "reference", 1)


MODES = ("reference", "replicated", "sequence_parallel")


@pytest.mark.parametrize(
    ("name", "world_size", "mode"),
    sampled(
        ((name, world_size, mode) for name in CONFIGS for world_size in (1, 2, 3, 4, 8) for mode in MODES),
        lambda name, world_size, mode: (name, world_size, mode) in {
            ("block", 2, "replicated"), ("block", 2, "sequence_parallel"), ("block", 3, "replicated"),
            ("block", 4, "reference"), ("block", 8, "sequence_parallel"), ("channel", 4, "replicated"),
            ("channel", 2, "sequence_parallel"), ("modelopt", 2, "replicated"), ("static", 4, "sequence_parallel"),
            ("tensor", 3, "reference"),
        },
    ),
)  # fmt: skip
def test_the_recipes_are_the_plain_model(in_fp8, plain_ops, name, world_size, mode):
    check(in_fp8(name, world_size=world_size), name, mode, world_size)


MOE = FAMILIES["qwen3-moe"] | {"moe_intermediate_size": 192}
SHARED = FAMILIES["qwen2-moe"] | {"moe_intermediate_size": 192, "initializer_range": 0.06, "num_hidden_layers": 2}
MIXTURES = {"qwen3-moe": MOE, "qwen2-moe": SHARED | {"shared_expert_intermediate_size": 192}}


@pytest.mark.parametrize(
    ("family", "name", "world_size", "mode", "layout"),
    sampled(
        (
            (family, name, world_size, mode, layout)
            for family in MIXTURES
            for name in ("block", "channel", "modelopt")
            for world_size, layout in (
                (1, "whole"), (2, "whole"), (3, "slices"), (4, "slices"), (4, (2, 2)), (8, "slices"),
            )
            for mode in MODES
        ),
        lambda *one: one in {
            ("qwen3-moe", "block", 1, "reference", "whole"), ("qwen3-moe", "block", 2, "sequence_parallel", "whole"),
            ("qwen3-moe", "block", 4, "replicated", "slices"), ("qwen2-moe", "block", 4, "sequence_parallel", (2, 2)),
            ("qwen2-moe", "channel", 2, "replicated", "whole"), ("qwen3-moe", "modelopt", 4, "reference", (2, 2)),
        },
    ),
)  # fmt: skip
def test_mixtures_are_the_plain_model(in_fp8, plain_ops, family, name, world_size, mode, layout):
    changes = {key: value for key, value in MIXTURES[family].items() if key not in ("family", "kv_heads")}
    made = in_fp8(name, MIXTURES[family]["family"], world_size, **changes)
    over = {"whole": 1, "slices": world_size}.get(layout) or layout[1]
    # Of this one's first prompt an input near the middle of two e4m3 numbers leads a router to another expert.
    seed = int((family, name, world_size) == ("qwen3-moe", "block", 3))
    check(made, name, mode, world_size, steps=6, expert_ranks=over, expert_layout=layout, seed=seed)


def test_the_recipes_are_the_plain_model_over_simulated_kernels(in_fp8):
    check(in_fp8("block"), "block", "replicated", 2, batch=1, steps=2, fused=True)


class AdaptedLinear(torch.nn.Module):
    """An fp8 matrix of the plain model, and beside it a product with the inputs before they are rounded."""

    def __init__(self, base, a, b, scale):
        super().__init__()
        self.base, self.a, self.b, self.scale = base, a, b, scale

    def forward(self, x):
        return self.base(x) + (self.scale * (x.double() @ self.a.double().T) @ self.b.double().T).to(x.dtype)


def with_adapter(model, directory):
    """The plain model with an adapter of rank 4 and scale 2 beside its matrices, as saved in ``directory``."""
    model = copy.deepcopy(model)
    for name, tensor in load_file(directory / "adapter_model.safetensors").items():
        parent, _, part = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight").rpartition(".")
        if name.endswith("lora_A.weight"):
            module = model.get_submodule(parent)
            b = load_file(directory / "adapter_model.safetensors")[name.replace("lora_A", "lora_B")]
            setattr(module, part, AdaptedLinear(getattr(module, part), tensor, b, 2.0))
    return model


def adapted_logits(team, directory, adapter, tokens, options):
    """Logits of row 0 without an adapter and of row 1 with it."""
    model = Decoder.from_pretrained(directory, team, **options)
    model.load_adapters({"one": adapter})
    batch, length = tokens.shape
    cache, pages = model.new_cache(1 + batch, 16), 1 + torch.arange(batch, dtype=torch.int32)[:, None]
    numbers = torch.tensor([-1, 0], dtype=torch.int32).repeat_interleave(length)
    step = replace(model.prefill_step([(0, length)] * batch, pages, 16), adapters=numbers)
    return model.lm_head.gather(model(tokens.flatten(), step, cache)).view(batch, length, -1).float()


@pytest.mark.parametrize(
    ("name", "world_size", "targets", "mode"),
    [
        ("block", 2, [*ATTENTION, *MLP], "auto"),
        ("channel", 3, ["q_proj", "down_proj"], "replicated"),
        ("static", 1, ["o_proj", "up_proj"], "sequence_parallel"),
    ],
)
def test_adapters_take_the_rows_that_fp8_matrices_round(in_fp8, plain_ops, tmp_path, name, world_size, targets, mode):
    directory, _, model, tensors = in_fp8(name, world_size=world_size)
    make_adapter(tmp_path / "one", model, targets, 4, 1)
    base = reference(model, tensors, name, world_size)
    tokens = prompt(2, 9)
    expected = torch.stack([
        reference_logits(one, row[None])[0]
        for one, row in zip((base, with_adapter(base, tmp_path / "one")), tokens, strict=True)
    ])  # fmt: skip
    assert row_errors(reference_logits(base, tokens[1:]), expected[1:]).min() > 0.1, "the adapter changes nothing"
    arguments = (directory, tmp_path / "one", tokens, {"mode": mode, "fused": False})
    for answered in weft.simulate(adapted_logits, world_size, args=arguments):
        errors = row_errors(answered, expected)
        assert errors.median() <= TOLERANCE and errors.max() <= MOST


@pytest.mark.parametrize("name", ["block", "channel"])
def test_adapters_over_fp8_by_simulated_kernels(in_fp8, tmp_path, name):
    """Kernels before adapted matrices write rows of 16 bits, others rows of fp8."""
    directory, _, model, tensors = in_fp8(name)
    make_adapter(tmp_path / "one", model, ["v_proj", "o_proj", "gate_proj"], 4, 1)
    tokens, base = prompt(2, 3), reference(model, tensors, name, 2)
    plain = zip((base, with_adapter(base, tmp_path / "one")), tokens, strict=True)
    expected = torch.stack([reference_logits(one, row[None])[0] for one, row in plain])
    by_torch, by_kernels = (
        weft.simulate(
            adapted_logits, 2, args=(directory, tmp_path / "one", tokens, {"dtype": torch.bfloat16, "fused": fused})
        )
        for fused in (False, True)
    )
    assert row_errors(by_kernels[0], expected).mean() <= 1.2 * row_errors(by_torch[0], expected).mean()
    assert row_errors(by_torch[0], expected).mean() < 0.1


def test_adapters_over_weights_made_fp8_at_load(make_checkpoint, plain_ops, tmp_path):
    directory, model = make_checkpoint("Qwen3", **SIZES | heads_of(1))
    make_adapter(tmp_path / "one", model, [*ATTENTION, *MLP], 4, 1)
    directory_of_fp8 = tmp_path / "fp8"
    directory_of_fp8.mkdir()
    write(directory_of_fp8, directory, "block")
    made, read = (
        weft.simulate(
            adapted_logits, 2, args=(of, tmp_path / "one", prompt(2, 5), {"fused": False, "quantization": form})
        )[0]
        for of, form in ((directory, "fp8"), (directory_of_fp8, None))
    )
    assert torch.equal(made, read)


def logits_in_bf16(team, directory, mode, fused, tokens):
    model = Decoder.from_pretrained(directory, team, mode=mode, dtype=torch.bfloat16, fused=fused)
    return all_logits(model, tokens).float()


@pytest.mark.parametrize(
    ("name", "mode"), [("block", "replicated"), ("block", "sequence_parallel"), ("channel", "replicated")]
)
def test_rows_of_16_bits_go_to_kernels_that_take_fp8_weights(in_fp8, monkeypatch, name, mode):
    """They are as near to the plain model as torch's operations with the same rounding of 16-bit rows."""
    directory, _, model, tensors = in_fp8(name)
    tokens = prompt(2, 9)
    expected = reference_logits(reference(model, tensors, name, 2), tokens)
    by_torch = weft.simulate(logits_in_bf16, 2, args=(directory, "reference", False, tokens))[0]

    def refuse(x, w):
        raise AssertionError("the weight is dequantized before the op")

    monkeypatch.setattr(quantized, "operands", refuse)
    for answered in weft.simulate(logits_in_bf16, 2, args=(directory, mode, True, tokens)):
        assert row_errors(answered, expected).mean() <= 1.2 * row_errors(by_torch, expected).mean()


def logits_of_experts(team, directory, mode, fused, layout, tokens):
    options = {"mode": mode, "dtype": torch.bfloat16, "fused": fused, "expert_layout": layout}
    return all_logits(Decoder.from_pretrained(directory, team, **options), tokens).float()


@pytest.mark.parametrize(
    ("family", "name", "world_size", "mode", "layout"),
    sampled(
        (
            (family, name, world_size, mode, layout)
            for family in MIXTURES
            for name in ("block", "channel", "modelopt")
            for world_size, layout in ((1, "whole"), (2, "whole"), (2, "slices"), (4, "slices"), (4, (2, 2)))
            for mode in MODES[1:]
        ),
        lambda *one: one in {
            ("qwen3-moe", "block", 1, "replicated", "whole"), ("qwen3-moe", "block", 2, "sequence_parallel", "whole"),
            ("qwen3-moe", "block", 2, "replicated", "slices"), ("qwen3-moe", "channel", 2, "sequence_parallel", "whole"),
            ("qwen2-moe", "block", 2, "sequence_parallel", "slices"), ("qwen3-moe", "modelopt", 2, "replicated", "whole"),
        },
    ),
)  # fmt: skip
def test_experts_of_16_bit_rows_go_to_kernels_that_take_fp8_weights(
    in_fp8, monkeypatch, family, name, world_size, mode, layout
):
    """In the median of the rows: of a token whose choices are close, rounding to 16 bits may choose another expert."""
    changes = {key: value for key, value in MIXTURES[family].items() if key not in ("family", "kv_heads")}
    changes |= {"moe_intermediate_size": 256, "num_hidden_layers": 1}
    changes |= {"shared_expert_intermediate_size": 256} if family == "qwen2-moe" else {}
    directory, _, model, tensors = in_fp8(name, MIXTURES[family]["family"], world_size, **changes)
    tokens = prompt(2, 5)
    over = {"whole": 1, "slices": world_size}.get(layout) or layout[1]
    expected = reference_logits(reference(model, tensors, name, world_size, over), tokens)
    arguments = (directory, "reference", False, layout, tokens)
    by_torch = weft.simulate(logits_of_experts, world_size, args=arguments)[0]

    def refuse(x, w):
        raise AssertionError("experts are dequantized before the op")

    monkeypatch.setattr(quantized, "operands", refuse)
    for answered in weft.simulate(logits_of_experts, world_size, args=(directory, mode, True, layout, tokens)):
        assert row_errors(answered, expected).median() <= 1.25 * row_errors(by_torch, expected).median()


@pytest.mark.parametrize("world_size", [2, 3, 4, 8])
@pytest.mark.parametrize("name", ["block", "channel", "tensor"])
def test_dequantized_weights_are_bit_for_bit_those_of_one_rank(in_fp8, name, world_size):
    """Blocks are cut by edges of ranks, and by the seams of q, k and v, and of gate and up."""
    directory, *_ = in_fp8(name, world_size=world_size)
    arguments = (directory, torch.float8_e4m3fn, {})
    [alone] = weft.simulate(matrices_of, 1, args=arguments)
    check_cut(alone, weft.simulate(matrices_of, world_size, args=arguments), SIZES["head_dim"])


def test_bytes_and_scales_are_as_downloaded(in_fp8):
    """One rank's blocks are the checkpoint's where they are whole, and merged in the order of the GEMM."""
    directory, _, _, tensors = in_fp8("block", intermediate_size=256)

    def main(team):
        mlp = Decoder.from_pretrained(directory, team, mode="reference").layers[0].weights.mlp
        return mlp.gate_up, mlp.down

    [(gate_up, down)] = weft.simulate(main, 1)
    prefix = "model.layers.0.mlp"
    for matrix, parts in ((gate_up, ("gate_proj", "up_proj")), (down, ("down_proj",))):
        data = torch.cat([tensors[f"{prefix}.{part}.weight"].view(torch.uint8) for part in parts])
        scales = torch.cat([tensors[f"{prefix}.{part}.weight_scale_inv"] for part in parts])
        assert torch.equal(matrix.data.view(torch.uint8), data)
        assert torch.equal(matrix.scales, scales)


def test_scales_in_bf16_are_read(make_checkpoint, tmp_path):
    """As Qwen3-FP8 has them."""
    source, model = make_checkpoint(**SIZES)
    tensors = write(tmp_path, source, "block", scale_dtype=torch.bfloat16)
    check((tmp_path, model, tensors), "block", "reference", 1, steps=4)
    assert Checkpoint(tmp_path).dtype() == "float32"


def test_transformers_dequantizes_the_same_weights(in_fp8):
    """Its own fp8 modules need kernels that are downloaded, so it computes with inputs of 16 or 32 bits."""
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    # Whole blocks: it divides a ragged matrix into equal ones, which no checkpoint has.
    directory, *_ = in_fp8("block", hidden_size=256, kv_heads=4)
    config = transformers.FineGrainedFP8Config(dequantize=True)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        directory, quantization_config=config, dtype=torch.float32
    )
    tokens = prompt(2, 9)

    def main(team):
        model = Decoder.from_pretrained(directory, team, mode="reference")
        return all_logits(model, tokens), model.layers[1].weights.mlp.down.dequantized(torch.float32)

    [(logits, down)] = weft.simulate(main, 1)
    assert torch.equal(down, theirs.model.layers[1].mlp.down_proj.weight)
    assert relative_rms(logits, reference_logits(theirs, tokens)) < 0.15  # the rounding of inputs


@pytest.mark.parametrize("mode", ["replicated", "sequence_parallel"])
@pytest.mark.parametrize("name", ["fp8", "fp8_per_channel"])
def test_experts_made_fp8_at_load_are_the_plain_model(make_checkpoint, plain_ops, tmp_path, name, mode):
    """The same model as of a checkpoint that was quantized before; its experts are cut in the middle of a block."""
    scheme = {"fp8": "block", "fp8_per_channel": "channel"}[name]
    source, model = make_checkpoint(MOE["family"], **SIZES | {key: MOE[key] for key in MOE if key != "family"})
    tensors = write(tmp_path, source, scheme)
    check((source, model, tensors), scheme, mode, 4, steps=4, expert_ranks=4, quantization=name, expert_layout="slices")


def test_gradients_are_refused(in_fp8):
    directory, *_ = in_fp8("block")

    def main(team):
        mlp = Decoder.from_pretrained(directory, team, mode="replicated", fused=False).layers[0].mlp
        x = torch.zeros(2, SIZES["hidden_size"], requires_grad=True)
        with pytest.raises(RuntimeError, match="weights in fp8 have no gradients"):
            mlp(x)
        with torch.no_grad():
            return mlp(x).shape

    assert weft.simulate(main, 1) == [(2, SIZES["hidden_size"])]


def swap_scales(model):
    for layer in model.layers:
        scales = layer.mlp.gate_up_proj.scales.scales.data
        scales.copy_(scales.roll(1, 0))


def transpose_scales(model):
    for layer in model.layers:
        scales = layer.self_attn.o_proj.scales.scales.data
        scales.copy_(scales.T.contiguous().view_as(scales).roll(1, 1))


def another_input_scale(model):
    for layer in model.layers:
        layer.mlp.down_proj.scales.input_scale.data.mul_(2)


@pytest.mark.parametrize(
    ("name", "mutate"),
    [("block", swap_scales), ("block", transpose_scales), ("channel", swap_scales), ("static", another_input_scale)],
)
def test_of_the_test_a_wrong_scale_is_beyond_the_tolerance(in_fp8, name, mutate):
    directory, _, model, tensors = in_fp8(name)
    tokens = prompt(2, 9)
    expected = reference_logits(reference(model, tensors, name), tokens)

    def main(team):
        model = Decoder.from_pretrained(directory, team, mode="reference")
        mutate(model)
        return all_logits(model, tokens)

    [found] = weft.simulate(main, 1)
    assert relative_rms(found, expected) > 12 * TOLERANCE
