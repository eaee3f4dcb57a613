"""Families whose rotary embedding is not of whole heads in all layers read config.json as transformers does."""

import copy

import pytest
import torch

import weft
from tests import fp8_checkpoints
from tests.against_transformers import FAMILIES, relative_rms
from tests.quantized_checkpoints import save
from weft.errors import CheckpointError
from weft.kernels.fp8 import Fp8
from weft.models import Checkpoint, Decoder, DecoderConfig
from weft.models.config import unreached_positions
from weft.models.invariant import check_invariant

SMALL = {
    "vocab_size": 64, "hidden_size": 128, "intermediate_size": 64, "num_hidden_layers": 5, "num_attention_heads": 8,
}  # fmt: skip
FACTORS = {"short_factor": [1.0, 1.5, 2.0, 2.0, 3.0, 3.0], "long_factor": [1.0, 4.0, 9.0, 9.0, 9.0, 20.0]}
LONG = {
    "rope_scaling": {"type": "longrope", **FACTORS}, "partial_rotary_factor": 0.75, "max_position_embeddings": 512,
    "original_max_position_embeddings": 64,
}  # fmt: skip
YARN = {
    "rope_type": "yarn", "rope_theta": 50.0, "factor": 8.0, "original_max_position_embeddings": 64, "llama_4_scaling_beta": 0,
}  # fmt: skip
ALPHA = {
    "type": "dynamic", "alpha": 1000.0, "factor": 1.0, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0,
}  # fmt: skip
WINDOW = {"use_sliding_window": True, "sliding_window": 7}
TYPES = ["sliding_attention", "full_attention", "full_attention", "sliding_attention", "full_attention"]


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("SmolLM3", {}),
        ("SmolLM3", {"no_rope_layer_interval": 2, **WINDOW}),
        ("SmolLM3", {"no_rope_layers": [1, 0, 0, 1, 1, 0], "attention_bias": True}),
        ("SmolLM3", {"layer_types": TYPES, **WINDOW}),
        ("SmolLM3", {"sliding_window": 7}),
        ("Phi3", {}),
        ("Phi3", {"sliding_window": 9, "num_key_value_heads": 2, "rope_theta": 250000.0}),
        ("Phi3", {"partial_rotary_factor": 0.5}),
        ("Phi3", LONG),
        ("Phi3", LONG | {"original_max_position_embeddings": 512}),
        ("Ministral3", {}),
        ("Ministral3", {"rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 0.0}}),
        ("Ministral3", {"rope_parameters": YARN | {"mscale": 0, "mscale_all_dim": 1.0}}),
        ("Glm", {}),
        ("Glm", {"partial_rotary_factor": 0.25, "attention_bias": False, "head_dim": 64}),
        ("Helium", {"num_key_value_heads": 4, "head_dim": 16}),
        ("Cwm", {}),
        ("Cwm", {"layer_types": TYPES, "sliding_window": 7, "rope_theta": 70.0}),
        ("Ministral", {"rope_theta": 70.0, "head_dim": 16}),
        ("Ministral", {"layer_types": TYPES, "sliding_window": 7, "num_key_value_heads": 4, "head_dim": 16}),
        ("Ministral", {"sliding_window": None, "head_dim": 16}),
        ("HunYuanDenseV1", {"num_key_value_heads": 4, "head_dim": 32}),
        ("HunYuanDenseV1", {"head_dim": 16, "attention_bias": True, "rope_scaling": ALPHA}),
        ("HunYuanDenseV1", {"head_dim": 16, "rope_scaling": {"type": "linear", "factor": 4.0}}),
        ("Glm4", {}),
        ("Glm4", {"partial_rotary_factor": 0.25, "attention_bias": False, "head_dim": 32}),
    ],
    ids=str,
)
def test_a_config_means_what_it_means_to_transformers(name, changes):
    transformers = pytest.importorskip("transformers")
    theirs = getattr(transformers, f"{name}Config")(**SMALL | {"pad_token_id": 0} | copy.deepcopy(changes))
    config = DecoderConfig.from_dict({"model_type": theirs.model_type} | SMALL | changes)
    model = getattr(transformers, f"{name}ForCausalLM")(theirs).model
    for key in ("num_key_value_heads", "rms_norm_eps", "tie_word_embeddings"):
        assert getattr(config, key) == getattr(theirs, key), key
    if name != "Ministral3":
        assert config.max_position_embeddings == theirs.max_position_embeddings
    for positions in (16, 400):
        frequencies, factor = config.rotary.frequencies(config.head_dim, torch.device("cpu"), positions)
        cos, sin = model.rotary_emb(torch.ones(1), torch.arange(positions)[None])
        angles = torch.arange(positions)[:, None] * frequencies
        for part, angle in ((cos, angles.cos()), (sin, angles.sin())):
            half = angle * factor
            whole = torch.cat((half, half), dim=-1)
            torch.testing.assert_close(part[0], whole, rtol=1e-5, atol=1e-6)
    for index, layer in enumerate(model.layers):
        attention = layer.self_attn
        assert config.head_dim == attention.head_dim
        assert (config.rotary_of(index) is not None) == bool(getattr(attention, "use_rope", True))
        window = theirs.sliding_window if name == "Phi3" else getattr(attention, "sliding_window", None)
        assert config.attention.window(index) == window
        assert config.attention.output_bias == (attention.o_proj.bias is not None)
        projection = getattr(attention, "qkv_proj", None) or attention.q_proj
        assert config.attention.bias == (projection.bias is not None)
    assert config.attention.interleaved == (name in ("Glm4", "Glm", "Helium"))


def test_sequences_end_before_queries_are_scaled_and_say_so(make_checkpoint):
    modeling = pytest.importorskip("transformers.models.ministral3.modeling_ministral3")
    directory, _ = make_checkpoint(**FAMILIES["ministral3"])
    most = DecoderConfig.of(Checkpoint(directory)).max_position_embeddings
    scales = modeling.get_llama_4_attn_scale(torch.arange(most + 1)[None], 0.5, 128).flatten()
    assert (scales[:-1] == 1).all() and scales[-1] > 1
    [line] = unreached_positions(Checkpoint(directory))
    assert line.startswith("config.json: sequences have up to 128 of 512 positions")
    with pytest.raises(ValueError, match="max_seq_len=129 is not in 2 .. max_position_embeddings=128"):
        weft.simulate(lambda team: weft.Engine(directory, team, mode="reference", max_seq_len=129), 1)
    assert not unreached_positions(Checkpoint(make_checkpoint(**FAMILIES["qwen3-yarn"])[0]))


@pytest.mark.parametrize(
    ("model_type", "changes", "message"),
    [
        ("smollm3", {"no_rope_layers": [1, 0]}, "no_rope_layers=.* is not a list of 0 and 1 for num_hidden_layers=5"),
        ("smollm3", {"no_rope_layers": [1, 0, 2, 1, 1]}, "no_rope_layers=.* is not a list of 0 and 1"),
        ("smollm3", {"no_rope_layer_interval": 0}, "no_rope_layer_interval=0 is not a positive integer"),
        ("smollm3", {"layer_types": TYPES}, r"layer_types\[0\]='sliding_attention' has no window"),
        ("phi3", {"partial_rotary_factor": 1.5}, "partial_rotary_factor=1.5 is not a number above 0 and up to 1"),
        ("phi3", {"partial_rotary_factor": 0.6}, "partial_rotary_factor=0.6 of head_dim=16 is 9, which is odd"),
        ("phi3", LONG | {"partial_rotary_factor": 1.0}, "long_factor has 6 numbers, and a head 8 angles"),
        (
            "phi3",
            LONG | {"original_max_position_embeddings": None},
            "'longrope' needs original_max_position_embeddings, factor",
        ),
        (
            "phi3",
            {"rope_scaling": {"type": "longrope", **FACTORS, "long_factor": 3}},
            "long_factor=3 is not a list of num",
        ),
        ("phi3", {"resid_pdrop": 0.5}, "resid_pdrop=0.5 is not supported"),
        (
            "ministral3",
            {"rope_parameters": {"rope_type": "default", "rope_theta": 50.0, "llama_4_scaling_beta": 0.1}},
            "llama_4_scaling_beta=0.1 needs original_max_position_embeddings, which is None",
        ),
        (
            "glm4_moe_lite",
            {"mlp_layer_types": ["dense"], "num_key_value_heads": 8},
            "mlp_layer_types=.* is not a list of 'dense' and 'sparse' for",
        ),
        ("glm4", {"attention_bias": "yes"}, "attention_bias='yes' is not true or false"),
        ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5 is not supported"),
        (
            "ernie4_5_moe",
            {"num_key_value_heads": 8, "moe_layer_end_index": "7"},
            "moe_layer_end_index='7' is not the index of",
        ),
        ("ernie4_5_moe", {"num_key_value_heads": 8, "moe_k": 0}, "moe_k=0 is not an integer in 1 .. 16"),
        ("ernie4_5_moe", {"use_bias": True}, "use_bias=True is not supported; weft runs ERNIE 4.5 MoE with False"),
        (
            "exaone_moe",
            {"num_key_value_heads": 8, "is_moe_layer": [False, False, True, True, True]},
            r"is_moe_layer=\[False, False, True, True, True\] does not agree with mlp_layer_types or first_k_dense_rep.*: "
            r"by them it would be \[False, True, True, True, True\]",
        ),
        (
            "exaone_moe",
            {"num_key_value_heads": 8, "first_k_dense_replace": 3, "first_last_k_dense_replace": 1},
            "first_last_k_dense_replace=1 does not agree with .*: by them it would be 3",
        ),
        (
            "hunyuan_v1_dense",
            {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
            "rope_scaling: type='dynamic' is not supported",
        ),
        (
            "hunyuan_v1_dense",
            {"rope_scaling": ALPHA | {"alpha": "2"}},
            "alpha='2' is not a number from 0.000001 to 1000000",
        ),
        (
            "hunyuan_v1_dense",
            {"rope_scaling": ALPHA | {"gamma": 1}},
            "rope_scaling: gamma=1 is a key that weft does not know",
        ),
        (
            "helium",
            {"num_key_value_heads": 4},
            "num_attention_heads \\* head_dim = 1024 is not hidden_size=128; Helium's o_proj",
        ),
        ("cwm", {"sliding_window": None}, r"layer_types\[1\]='sliding_attention' has no window"),
        ("llama", {"rope_scaling": ALPHA}, "rope_scaling: type='dynamic' is not supported"),
        ("hunyuan_v1_dense", {"use_cla": True}, "use_cla=True is not supported; weft runs Hunyuan with False"),
        (
            "hunyuan_v1_dense",
            {"attention_head_dim": 64, "head_dim": 128},
            "attention_head_dim=64 does not agree with heads of 128, which weft reads",
        ),
        ("minimax_m2", {"rotary_dim": 129}, "rotary_dim=129 is not an integer in 1 .. 128"),
        ("minimax_m2", {"rotary_dim": 64, "head_dim": "128"}, "head_dim='128' is not a positive integer"),
        ("minimax_m2", {"attn_type_list": [1, 0]}, r"attn_type_list=\[1, 0\] has layers of another kind"),
        (
            "exaone4",
            {"num_key_value_heads": 8, "sliding_window_pattern": "LLLG"},
            "sliding_window_pattern='LLLG' is not a positive integer",
        ),
    ],
    ids=str,
)
def test_keys_that_a_family_does_not_run_are_refused_by_name(model_type, changes, message):
    with pytest.raises(CheckpointError, match="^config.json: .*" + message):
        DecoderConfig.from_dict({"model_type": model_type} | SMALL | changes)


def test_norms_after_the_rotary_embedding_are_refused_where_bits_are_the_same():
    config = DecoderConfig.from_dict({"model_type": "hunyuan_v1_dense"} | SMALL)
    with pytest.raises(ValueError, match="mode='invariant' of Hunyuan with norms after the rotary embedding: "):
        check_invariant(config, torch.bfloat16, None)


def dequantized(team, directory, quantization):
    """Rows of q, k and v of the first layer, in fp32."""
    model = Decoder.from_pretrained(directory, team, mode="reference", quantization=quantization)
    matrix = model.layers[0].self_attn.qkv_proj.matrix
    return matrix.dequantized(torch.float32) if isinstance(matrix, Fp8) else matrix.detach().clone()


@pytest.mark.parametrize("name", ["glm4", "phi3-long"])
@pytest.mark.parametrize("quantization", ["fp8_per_channel", "fp8_per_block"])
def test_rows_in_another_order_keep_their_scales(make_checkpoint, name, quantization):
    directory, _ = make_checkpoint(**FAMILIES[name])
    for world_size in (1, 2):
        whole = weft.simulate(dequantized, world_size, args=(directory, None))
        for rows, rounded in zip(
            whole, weft.simulate(dequantized, world_size, args=(directory, quantization)), strict=True
        ):
            assert relative_rms(rounded, rows) < 0.04


@pytest.mark.parametrize("name", ["glm4", "phi3-long"])
def test_scales_of_parts_of_rows_are_refused(make_checkpoint, name):
    directory, _ = make_checkpoint(**FAMILIES[name])
    with pytest.raises(ValueError, match="q_proj and k_proj whose scales are not of whole heads or of single rows"):
        weft.simulate(dequantized, 1, args=(directory, "int4"))


MATRICES = ("qkv", "o", "gate_up", "down")


def matrices(team, directory):
    """(matrices of this rank's first layer in fp32, whether they are in fp8)"""
    weights = Decoder.from_pretrained(directory, team, mode="reference").layers[0].weights
    pairs = {**weights.attention._asdict(), **weights.mlp._asdict()}
    read = [pairs[name] for name in MATRICES]
    in_fp8 = [isinstance(matrix, Fp8) for matrix in read]
    return [
        one.dequantized(torch.float32) if of_fp8 else one.clone() for one, of_fp8 in zip(read, in_fp8, strict=True)
    ], in_fp8


def test_published_blocks_of_whole_heads_are_read_in_another_order(make_checkpoint, tmp_path):
    """MiniMax-M2's heads have 128 elements, as many as a block has rows."""
    sizes = {"head_dim": 128, "hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 1}
    source, _ = make_checkpoint(**FAMILIES["minimax-m2"] | {"num_attention_heads": 4, "kv_heads": 2} | sizes)
    quantized, plain = tmp_path / "fp8", tmp_path / "fp32"
    quantized.mkdir()
    plain.mkdir()
    tensors = fp8_checkpoints.write(
        quantized, source, "block", fp8_checkpoints.CONFIGS["block"] | {"fmt": "float8_e4m3fn"}
    )
    scales = {name: tensors.pop(name) for name in [*tensors] if name.endswith("_scale_inv")}
    for name, scale in scales.items():
        name = name.removesuffix("_scale_inv")
        tensors[name] = fp8_checkpoints.dequantized(tensors[name], scale, "block", torch.float32)
    save(plain, source, tensors, None)
    for world_size in (1, 2):
        read, wanted = (weft.simulate(matrices, world_size, args=(path,)) for path in (quantized, plain))
        for (found, in_fp8), (expected, _) in zip(read, wanted, strict=True):
            assert all(in_fp8)
            assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
