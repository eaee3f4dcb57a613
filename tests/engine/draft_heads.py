"""Draft heads in plain torch, from their description: whole sequences, no cache, no ranks; and random checkpoints of them."""

import json
import shutil

import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional as F

from weft.ops.vocab.sample_argmax import gumbel_noise

HIDDEN, VOCAB, DRAFT_VOCAB, EPS, THETA = 48, 257, 100, 1e-6, 50.0
HEADS, KV_HEADS, HEAD_DIM, INTERMEDIATE = 4, 2, 16, 96
LAYERS = (0, 1, 2)
# Sizes of a mixture of experts, by the names of GLM's and DeepSeek's configurations in transformers.
MIXTURE = {
    "vocab_size": VOCAB, "hidden_size": HIDDEN, "intermediate_size": INTERMEDIATE, "moe_intermediate_size": 32,
    "num_hidden_layers": 2, "num_attention_heads": HEADS, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "n_shared_experts": 1, "first_k_dense_replace": 1, "rms_norm_eps": EPS, "rope_theta": THETA,
    "max_position_embeddings": 96,
}  # fmt: skip
EAGLE3 = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "vocab_size": VOCAB,
    "draft_vocab_size": DRAFT_VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": INTERMEDIATE,
    "num_hidden_layers": 1,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "rms_norm_eps": EPS,
    "rope_theta": THETA,
    "max_position_embeddings": 48,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "eagle_aux_hidden_state_layer_ids": list(LAYERS),
}


def norm(x, weight):
    return F.rms_norm(x, (x.shape[-1],), weight, EPS)


def rotated(x, positions):
    """x [T, heads, HEAD_DIM] with its halves turned by position * THETA ** (-2 i / HEAD_DIM)."""
    angles = positions[:, None] * THETA ** (-torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    one, two = x.chunk(2, -1)
    return torch.cat((one * cos - two * sin, two * cos + one * sin), -1)


def attention(x, w, qk_norm):
    """Causal attention of rows 0, 1, … of x; w: weights by their last names."""
    length = len(x)
    q, k, v = (F.linear(x, w[f"{name}_proj"]).view(length, -1, HEAD_DIM) for name in "qkv")
    if qk_norm:
        q, k = norm(q, w["q_norm"]), norm(k, w["k_norm"])
    positions = torch.arange(length)
    q, k = rotated(q, positions), rotated(k, positions)
    k, v = (part.repeat_interleave(HEADS // KV_HEADS, 1) for part in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * HEAD_DIM**-0.5
    scores = scores.masked_fill(positions[None] > positions[:, None], -torch.inf)
    attended = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v)
    return F.linear(attended.flatten(1), w["o_proj"])


def mlp(x, w):
    return F.linear(F.silu(F.linear(x, w["gate_proj"])) * F.linear(x, w["up_proj"]), w["down_proj"])


class PlainEagle3:
    """Drafts after whole sequences by an EAGLE-3 checkpoint beside a model's."""

    def __init__(self, directory, target):
        self.weights = load_file(directory / "model.safetensors")
        config = json.loads((directory / "config.json").read_text())
        self.before, self.embedding = config.get("norm_before_residual", False), target.embedding
        self.embedding = self.weights.get("embed_tokens.weight", self.embedding)
        layer = "midlayer" if "midlayer.hidden_norm.weight" in self.weights else "layers.0"
        self.layer = {
            name.removeprefix(f"{layer}.").removesuffix(".weight").split(".")[-1]: value
            for name, value in self.weights.items()
            if name.startswith(layer)
        }
        ids = torch.arange(DRAFT_VOCAB)
        self.ids = ids + self.weights["d2t"] if "d2t" in self.weights else torch.arange(VOCAB)

    def given(self, states):
        return F.linear(torch.cat([states[layer] for layer in LAYERS], 1), self.weights["fc.weight"])

    def rows(self, tokens, hidden):
        """(hidden states, logits over token ids) of all rows."""
        w = self.layer
        embedded, normed = norm(self.embedding[tokens], w["input_layernorm"]), norm(hidden, w["hidden_norm"])
        residual = normed if self.before else hidden
        x = residual + attention(torch.cat((embedded, normed), 1), w, qk_norm=False)
        x = x + mlp(norm(x, w["post_attention_layernorm"]), w)
        logits = torch.full((len(x), VOCAB), -torch.inf)
        logits[:, self.ids] = F.linear(norm(x, self.weights["norm.weight"]), self.weights["lm_head.weight"])
        return x, logits


class Target:
    """Hidden states of a Qwen3 checkpoint by transformers."""

    def __init__(self, directory):
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager")
        self.embedding = self.model.get_input_embeddings().weight.detach()
        self.head = self.model.lm_head.weight.detach()

    @torch.no_grad()
    def states(self, tokens):
        """Inputs of all layers, and the normed output of the last one, [T, HIDDEN] each."""
        return [x[0] for x in self.model(torch.tensor([tokens]), output_hidden_states=True).hidden_states]


def drafts_after(head, target, tokens, drafts, params):
    """Drafts that follow `tokens` by a plain head: hidden states of the model but for the newest token's."""
    hidden, following, proposed = head.given(target.states(tokens[:-1])), list(tokens[1:]), []
    for _ in range(drafts):
        states, logits = head.rows(torch.tensor(following), hidden)
        at = len(following) + 1
        noise = gumbel_noise(torch.tensor([params.seed]), torch.tensor([at]), torch.arange(VOCAB))[0]
        token = int((logits[-1] + params.temperature * noise).argmax())
        proposed.append(token)
        following.append(token)
        hidden = torch.cat((hidden, states[-1:]))
    return proposed


def eagle3_shapes(config=EAGLE3, layer="midlayer"):
    """Shapes of a checkpoint's tensors by name."""
    attention = {"q": HEADS, "k": KV_HEADS, "v": KV_HEADS}
    shapes = {f"{layer}.self_attn.{name}_proj": (n * HEAD_DIM, 2 * HIDDEN) for name, n in attention.items()}
    shapes |= {f"{layer}.self_attn.o_proj": (HIDDEN, HEADS * HEAD_DIM)}
    shapes |= {f"{layer}.mlp.{name}_proj": (INTERMEDIATE, HIDDEN) for name in ("gate", "up")}
    shapes |= {f"{layer}.mlp.down_proj": (HIDDEN, INTERMEDIATE), "fc": (HIDDEN, 3 * HIDDEN)}
    shapes |= {f"{layer}.{name}": (HIDDEN,) for name in ("hidden_norm", "input_layernorm", "post_attention_layernorm")}
    return shapes | {"norm": (HIDDEN,), "lm_head": (config["draft_vocab_size"], HIDDEN)}


def random_tensors(shapes, seed):
    generator = torch.Generator().manual_seed(seed)
    return {
        name if name.endswith("bias") else f"{name}.weight": torch.rand(shape, generator=generator) + 0.5
        if "norm" in name
        else torch.randn(shape, generator=generator) * 0.2
        for name, shape in shapes.items()
    }


def save_eagle3(directory, *, layer="midlayer", seed=3, drop=(), add=None, **changed):
    """Write a random EAGLE-3 checkpoint."""
    config = EAGLE3 | changed
    tensors = random_tensors(eagle3_shapes(config, layer), seed)
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randperm(VOCAB, generator=generator)[: config["draft_vocab_size"]].sort().values
    tensors["d2t"] = ids - torch.arange(len(ids))
    tensors["t2d"] = torch.isin(torch.arange(VOCAB), ids)
    tensors |= add or {}
    directory.mkdir(parents=True, exist_ok=True)
    save_file({name: x for name, x in tensors.items() if name not in drop}, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def deeper(byte_model, directory, layers):
    """The byte model with more layers, the further ones drawn as its own."""
    shutil.copytree(byte_model, directory)
    config = json.loads((directory / "config.json").read_text()) | {"num_hidden_layers": layers}
    (directory / "config.json").write_text(json.dumps(config))
    tensors = load_file(directory / "model.safetensors")
    names = [name for name in tensors if name.startswith("model.layers.1.")]
    for index in range(2, layers):
        drawn = random_tensors(
            {name.replace(".1.", f".{index}.").removesuffix(".weight"): tensors[name].shape for name in names}, index
        )
        tensors |= drawn
    save_file(tensors, directory / "model.safetensors")
    return directory


class PlainMtp:
    """Drafts after whole sequences by the MTP head of a checkpoint, a layer of transformers applied again and again."""

    def __init__(self, target, tensors):
        """`tensors`: of the head, by the names that transformers gives them."""
        from transformers.modeling_layers import MtpModel

        config = target.model.config
        config.num_mtp_layers, config.mtp_layer_types = 1, ["full_attention"]
        self.model, self.target = MtpModel(target.model, 1), target
        self.model.config._attn_implementation = "eager"
        missing, unexpected = self.model.layers[0].load_state_dict(tensors, strict=False)
        assert not missing and not unexpected

    def given(self, states):
        return states[-1]

    @torch.no_grad()
    def rows(self, tokens, hidden):
        """(hidden states, logits) of all rows."""
        positions = torch.arange(len(tokens))[None]
        [x] = self.model.forward_layer(0, hidden[None], positions, None, input_ids=tokens[None])
        return x, F.linear(x, self.target.head)


def save_mtp(directory, target_directory, layout, *, seed=5, drop=()):
    """Write a copy of a checkpoint with a random MTP head; returns the head's tensors as PlainMtp takes them."""
    shutil.copytree(target_directory, directory)
    config = json.loads((directory / "config.json").read_text())
    index = config["num_hidden_layers"]
    tensors = load_file(directory / "model.safetensors")
    prefix = f"model.layers.{index - 1}."
    layer = {name.removeprefix(prefix): x.shape for name, x in tensors.items() if name.startswith(prefix)}
    shapes = {f"{layout.named('layer', index)}.{name.removesuffix('.weight')}": shape for name, shape in layer.items()}
    shapes |= {layout.named(part, index): (HIDDEN,) for part in ("enorm", "hnorm", "norm")}
    shapes |= {layout.named("eh_proj", index): (HIDDEN, 2 * HIDDEN)}
    drawn = random_tensors(shapes, seed)
    kept = {name: x for name, x in drawn.items() if name not in drop}
    save_file(tensors | kept, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 1}))
    names = {layout.named(part, index): part for part in ("enorm", "hnorm", "eh_proj")}
    names |= {layout.named("norm", index): "post_norm"}
    parts = {f"{part}.weight": drawn.pop(f"{name}.weight") for name, part in names.items()}
    of_layer = {name.removeprefix(f"{layout.named('layer', index)}."): x for name, x in drawn.items()}
    return parts | {f"mtp_block.{name}": x for name, x in with_stacked_experts(of_layer).items()}


def with_stacked_experts(tensors):
    """Tensors of a layer as transformers has them: all experts in one."""
    experts = {name: x for name, x in tensors.items() if ".experts." in name}
    if not experts:
        return tensors
    kept = {name: x for name, x in tensors.items() if name not in experts}
    count = 1 + max(int(name.split(".")[2]) for name in experts)

    def of_all(part):
        return torch.stack([experts[f"mlp.experts.{expert}.{part}_proj.weight"] for expert in range(count)])

    gate_up = torch.cat((of_all("gate"), of_all("up")), 1)
    return kept | {"mlp.experts.gate_up_proj": gate_up, "mlp.experts.down_proj": of_all("down")}


def sparse(byte_model, directory):
    """A Qwen3-MoE of the byte model's sizes."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    shutil.copytree(byte_model, directory)
    config = json.loads((directory / "config.json").read_text())
    config |= {"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    config |= {"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []}
    with torch.device("meta"):
        model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**config))
    shapes = {}
    for name, x in model.state_dict().items():
        name = name.removesuffix(".weight")
        if name.endswith("experts.gate_up_proj"):
            for expert in range(4):
                base = f"{name.removesuffix('gate_up_proj')}{expert}"
                shapes |= {f"{base}.{part}_proj": (32, HIDDEN) for part in ("gate", "up")}
                shapes |= {f"{base}.down_proj": (HIDDEN, 32)}
        elif not name.endswith("experts.down_proj"):
            shapes[name] = tuple(x.shape)
    save_file(random_tensors(shapes, 9), directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def glm(byte_model, directory):
    """A GLM-4.5 of the byte model's sizes, its first layer dense."""
    from transformers import Glm4MoeConfig, Glm4MoeForCausalLM

    config = Glm4MoeConfig(
        **MIXTURE, num_key_value_heads=KV_HEADS, head_dim=HEAD_DIM, use_qk_norm=True, attention_bias=True,
        partial_rotary_factor=0.5,
    )  # fmt: skip
    return save_random(Glm4MoeForCausalLM(config), byte_model, directory)


def deepseek(byte_model, directory):
    """A DeepSeek-V3 of the byte model's sizes: latent attention, its first layer dense."""
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    config = DeepseekV3Config(
        **MIXTURE, num_key_value_heads=HEADS, q_lora_rank=24, kv_lora_rank=32, qk_nope_head_dim=24, qk_rope_head_dim=16,
        v_head_dim=12, n_group=2, topk_group=1,
    )  # fmt: skip
    return save_random(DeepseekV3ForCausalLM(config), byte_model, directory)


def save_random(model, byte_model, directory):
    """Write a model of transformers with random weights, and the byte model's tokenizer."""
    shutil.copytree(byte_model, directory)
    model.save_pretrained(directory)
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [256]}))
    shapes = {name.removesuffix(".weight"): x.shape for name, x in load_file(directory / "model.safetensors").items()}
    save_file(random_tensors(shapes, 11), directory / "model.safetensors")
    return directory
