"""Multimodal checkpoints: the text model runs as transformers runs it, and the rest is left out with one line."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

import weft
from tests.against_transformers import TOLERANCE, check_logits_and_tokens, prompt, relative_rms
from weft.errors import CheckpointError
from weft.models import Checkpoint, Decoder, DecoderConfig, families, multimodal
from weft.models.quantization import Quantization

TEXT = {
    "vocab_size": 257, "hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 256, "initializer_range": 0.1,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
VISION = {
    "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 16,
    "patch_size": 8, "num_channels": 3,
}  # fmt: skip
MROPE = {
    "rope_parameters": {
        "rope_type": "default", "rope_theta": 50.0, "mrope_section": [4, 2, 2], "mrope_interleaved": True,
    },
}  # fmt: skip
QWEN_TOWER = {"depth": 1, "num_heads": 2, "out_hidden_size": 48, "deepstack_visual_indexes": [0]}
WRAPPED = {
    "mistral3": ("mistral", {"sliding_window": 5}, {"tie_word_embeddings": False}, {"model_type": "pixtral", "head_dim": 8}),
    "llava": ("llama", {"rope_theta": 50.0}, {}, {"model_type": "clip_vision_model"}),
    "idefics3": ("llama", {}, {}, {"model_type": "idefics3_vision"}),
    "internvl": (
        "qwen3", {}, {"tie_word_embeddings": True},
        {"model_type": "internvl_vision", "image_size": [16, 16], "patch_size": [8, 8]},
    ),
    "qwen3_vl": (
        "qwen3_vl_text", MROPE, {"tie_word_embeddings": True},
        QWEN_TOWER | {"model_type": "qwen3_vl_vision"},
    ),
    "qwen3_vl_moe": (
        "qwen3_vl_moe_text", {**MROPE, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}, {},
        QWEN_TOWER | {"model_type": "qwen3_vl_moe_vision"},
    ),
    "gemma3": ("gemma3_text", {"sliding_window": 5, "query_pre_attn_scalar": 16}, {}, {"model_type": "siglip_vision_model"}),
}  # fmt: skip
"""model_type of the whole → that of its text model, keys of it, keys of the whole, keys of its tower."""


@pytest.fixture(scope="session")
def make_wrapped(tmp_path_factory):
    """make_wrapped(name) -> (directory, transformers' model); the checkpoint is as transformers writes it."""
    transformers, made = pytest.importorskip("transformers"), {}

    def make(name):
        if name not in made:
            text, of_text, of_whole, of_tower = WRAPPED[name]
            config = transformers.AutoConfig.for_model(
                name, text_config=TEXT | {"model_type": text} | of_text, vision_config=VISION | of_tower, **of_whole
            )
            torch.manual_seed(3)
            model = getattr(transformers, multimodal.WRAPPERS[name].architecture)(config).eval()
            for key, weight in model.named_parameters():
                if "norm" in key:
                    torch.nn.init.uniform_(weight, 0.5, 1.5)
                elif key.endswith("bias"):
                    torch.nn.init.normal_(weight, std=0.2)
            directory = tmp_path_factory.mktemp(name)
            model.save_pretrained(directory)
            made[name] = directory, model
        return made[name]

    return make


def renamed(directory, source, rename):
    """The checkpoint with other names of tensors."""
    directory.mkdir()
    (directory / "config.json").write_text((source / "config.json").read_text())
    tensors = load_file(source / "model.safetensors")
    save_file({rename(name): tensor for name, tensor in tensors.items()}, directory / "model.safetensors")
    return directory


def as_transformers_5(name):
    """Name that a module of the whole has in transformers 5, of the name of the 4.x layout in the checkpoint."""
    if name.startswith("language_model.lm_head."):
        return name.removeprefix("language_model.")
    if name.startswith("language_model.model."):
        return "model.language_model." + name.removeprefix("language_model.model.")
    return f"model.{name}" if name.startswith(("vision_tower", "multi_modal_projector")) else name


@pytest.mark.parametrize("name", WRAPPED)
def test_the_text_model_of_a_multimodal_checkpoint_is_that_of_transformers(make_wrapped, tmp_path, name):
    if WRAPPED[name][0] not in families.FAMILIES:
        pytest.skip("its text model is of no family")
    directory, model = make_wrapped(name)
    tokens = prompt(2, 9)
    with torch.no_grad():
        expected = model(input_ids=tokens).logits
        wanted = model.generate(tokens, do_sample=False, max_new_tokens=8, eos_token_id=None)[:, tokens.shape[1] :]
    other = renamed(tmp_path / "transformers-5", directory, as_transformers_5)
    first, second = (set(load_file(path / "model.safetensors")) for path in (directory, other))
    assert first != second or name == "idefics3"
    for path, world_size in ((directory, 1), (other, 2)):
        arguments = path, "reference", tokens, 8
        for logits, generated in weft.simulate(check_logits_and_tokens, world_size, args=arguments):
            assert relative_rms(logits, expected) <= TOLERANCE
            assert torch.equal(generated.T, wanted)


def warnings_of(team, directory):
    checkpoint = Checkpoint(directory)
    return Decoder(DecoderConfig.of(checkpoint), team, mode="reference").load(checkpoint)


def test_the_rest_is_left_out_with_one_line(make_wrapped):
    directory, model = make_wrapped("mistral3")
    [line] = weft.simulate(warnings_of, 1, args=(directory,))[0]
    count = sum("language_model" not in name and "lm_head" not in name for name in model.state_dict())
    assert "tensors beside the text model, which weft leaves out: " in line and line.endswith(f"and {count - 3} more")
    assert "multi_modal_projector" in line


def test_a_config_may_be_read_whole_or_by_its_text_model(make_wrapped):
    directory, _ = make_wrapped("llava")
    whole = json.loads((directory / "config.json").read_text())
    assert DecoderConfig.from_dict(whole) == DecoderConfig.of(Checkpoint(directory))
    assert Checkpoint(directory).config == multimodal.text_config(whole)
    assert multimodal.text_config(multimodal.text_config(whole)) == multimodal.text_config(whole)


LLAVA = {
    "architectures": ["LlavaForConditionalGeneration"], "model_type": "llava", "image_token_index": 32000, "ignore_index": -100,
    "projector_hidden_act": "gelu", "torch_dtype": "float16", "vision_feature_layer": -2, "vocab_size": 32064,
    "text_config": {
        "_name_or_path": "lmsys/vicuna-7b-v1.5", "architectures": ["LlamaForCausalLM"], "max_position_embeddings": 4096,
        "model_type": "llama", "rms_norm_eps": 1e-05, "torch_dtype": "bfloat16", "vocab_size": 32064,
    },
    "vision_config": {"model_type": "clip_vision_model"},
}  # fmt: skip


def test_absent_sizes_are_the_ones_that_transformers_assumes():
    transformers = pytest.importorskip("transformers")
    for model_type, sizes in multimodal.SIZES.items():
        config = transformers.AutoConfig.for_model(model_type)
        assert sizes == tuple(getattr(config, name) for name in multimodal.SIZE_NAMES)
    for name, wrapper in multimodal.WRAPPERS.items():
        config = transformers.AutoConfig.for_model(name)
        assert config.text_config.model_type == wrapper.text and wrapper.tied == getattr(
            config, "tie_word_embeddings", False
        )
    voxtral = transformers.AutoConfig.for_model("voxtral", text_config={"model_type": "llama"}).text_config
    for name, value in multimodal.VOXTRAL_TEXT.items():
        assert value == (voxtral.rope_parameters[name] if name == "rope_theta" else getattr(voxtral, name))
    made = DecoderConfig.from_dict(LLAVA)
    assert (made.hidden_size, made.num_hidden_layers, made.vocab_size) == (4096, 32, 32064)
    assert made.dtype == torch.float16 and made.rms_norm_eps == 1e-5 and not made.tie_word_embeddings


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"architectures": ["LlavaModel"]},
            r"architectures=\['LlavaModel'\] is not supported; weft runs the text model of",
        ),
        ({"text_config": {"model_type": "mistral4"}}, "model_type='mistral4' is not supported; weft runs 'qwen3'"),
        (
            {"text_config": {"model_type": "llama4_text"}},
            "model_type='llama4_text' is not supported; it has attention in",
        ),
        ({"text_config": {"model_type": ["llama"]}}, r"model_type=\['llama'\] is not supported"),
        ({"text_config": None}, "model_type='llava' is not supported"),
        ({"model_type": "flamingo"}, "model_type='flamingo' is not supported"),
        ({"text_config": {"mlp_bias": True}}, "mlp_bias=True is not supported; weft runs Llama with False"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings='yes' is not true or false"),
    ],
    ids=str,
)
def test_text_models_that_weft_does_not_run_are_refused_by_name(changes, message):
    with pytest.raises(CheckpointError, match=f"^config.json: {message}"):
        DecoderConfig.from_dict(LLAVA | changes)


def test_modules_of_the_whole_may_be_named_as_not_quantized():
    content = {"quant_method": "fp8", "weight_block_size": [128, 128], "modules_to_not_convert": [
        "model.visual", "model.language_model.layers.0.mlp", "language_model.model.layers.1.self_attn"]}  # fmt: skip
    quantization = Quantization.of(content)
    assert quantization.ignores("model.layers.0.mlp.gate_proj") and quantization.ignores(
        "model.layers.1.self_attn.q_proj"
    )
    assert not quantization.ignores("model.layers.1.mlp.gate_proj")
    whole = LLAVA | {"quantization_config": content}
    assert DecoderConfig.from_dict(whole).quantization == quantization
