"""Training of a built-in model: `python -m scripts.train_builtin --model adder-moe --out DIR`.

It takes minutes on a CPU. A model reads `123+456=` and writes `579<eos>`: operands 0..999 without leading zeros, most
significant digit first.
1,000 sums of two three-digit numbers, and 1,000 with a shorter operand, are kept out of training, whichever operand
comes first. After training, the checkpoint is stored in bfloat16, read back and asked for all of them; `accuracy.json`
holds what came out. These sums choose nothing: the weights are those of the last step.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import random
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

import torch
import transformers
from tokenizers import Regex, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import WordLevel
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3Config,
    Qwen3MoeConfig,
)
from transformers.modeling_outputs import ModelOutput
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from weft.runtime.files import put

PAD, EOS, UNK = "<pad>", "<eos>", "<unk>"
VOCABULARY = {token: i for i, token in enumerate([PAD, EOS, UNK, *"0123456789+="])}
LONGEST = len("999+999=1998") + 1  # EOS
OWN = 16
"""Coordinates in which the rows of ids without a token differ: what else they have is equal, and compresses in the wheel."""
STEP_OF_EXPERTS, STEP_OF_OTHERS = 2**-7, 2**-8
"""Weights of the mixture's matrices, whose RMS is 0.09, are multiples of these, which takes 328 of 863 KB from the wheel.

Of the 190,000 sums with an operand below 100 1,903 are wrong, 1,864 where experts keep six bits of fraction; of the other
810,000 none.
"""

Pair = tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """Settings of a run: the same values on the same machine give the same weights."""

    steps: int = 3000
    batch_size: int = 512
    learning_rate: float = 2e-3
    warmup_steps: int = 200
    weight_decay: float = 0.01
    three_digit_share: float = 0.75
    """Share of sums with two three-digit operands; in the others each operand has one, two or three digits."""
    held_out: int = 1000
    seed: int = 0
    threads: int = 2
    report_every: int = 100
    save_every: int = 500

    def __post_init__(self):
        for name in ("steps", "batch_size", "warmup_steps", "held_out", "threads", "report_every", "save_every"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} is not positive; pass 1 or more")
        if self.held_out > 10_000:
            raise ValueError(f"held_out={self.held_out} leaves too few sums to train on; pass 10000 or fewer")


SIZES = {
    "vocab_size": 128,
    "hidden_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "initializer_range": 0.08,
    "tie_word_embeddings": True,
    "bos_token_id": None,
    "eos_token_id": VOCABULARY[EOS],
    "pad_token_id": VOCABULARY[PAD],
}
"""Sizes of both models. Up to 8 ranks split them evenly: 1 head of 16, 16 token ids each.

All widths, shards included, are multiples of 16, so that rows start on the 16 bytes that TMA requires.
heads * head_dim (128) differs from the hidden size (96), as in the real Qwen3s.
"""


def dense_config() -> Qwen3Config:
    """An MLP of 256 columns in each layer: 32 for each of 8 ranks."""
    return Qwen3Config(**SIZES, intermediate_size=256)


def experts_config() -> Qwen3MoeConfig:
    """8 experts of 64 columns in place of each MLP, one for each of 8 ranks; two for each token."""
    return Qwen3MoeConfig(
        **SIZES,
        intermediate_size=256,  # of layers without experts; there are none
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        norm_topk_prob=True,
        router_aux_loss_coef=0.01,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltIn:
    """How a built-in model is made."""

    config: Callable[[], PreTrainedConfig]
    settings: TrainConfig

    def build(self) -> PreTrainedModel:
        """The model with new weights."""
        return AutoModelForCausalLM.from_config(self.config(), dtype=torch.float32)


MODELS = {
    "adder": BuiltIn(config=dense_config, settings=TrainConfig()),
    "adder-moe": BuiltIn(config=experts_config, settings=TrainConfig(steps=3000, batch_size=256, threads=1)),
}
"""Directory of a built-in model -> how it is made."""


def build_tokenizer() -> transformers.PreTrainedTokenizerFast:
    """One token a character: digits, `+` and `=`. Text with another one is refused."""
    # UNK is in the vocabulary, but stands for nothing.
    tokenizer = Tokenizer(WordLevel(VOCABULARY, unk_token=""))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=EOS,
        unk_token=UNK,
        padding_side="left",
        model_max_length=64,
        clean_up_tokenization_spaces=False,
    )


def draw_pair(rng: random.Random, three_digit_share: float) -> Pair:
    """Two numbers from 0 to 999 for training."""
    if rng.random() < three_digit_share:
        return rng.randint(100, 999), rng.randint(100, 999)
    low_high = ((0, 9), (10, 99), (100, 999))
    return rng.randint(*rng.choice(low_high)), rng.randint(*rng.choice(low_high))


def held_out_sums(count: int, seed: int) -> tuple[list[Pair], list[Pair]]:
    """`count` pairs with two three-digit operands, and `count` with an operand below 100, drawn uniformly.

    No pair occurs twice, nor beside its mirror image (b, a).
    """
    rng = random.Random(f"held out {seed}")
    three_digit: dict[Pair, Pair] = {}
    shorter: dict[Pair, Pair] = {}
    while min(len(three_digit), len(shorter)) < count:
        a, b = rng.randint(0, 999), rng.randint(0, 999)
        kept = three_digit if min(a, b) >= 100 else shorter
        if len(kept) < count:
            kept.setdefault((min(a, b), max(a, b)), (a, b))
    return list(three_digit.values()), list(shorter.values())


def both_orders(*sums: list[Pair]) -> set[Pair]:
    """All pairs of the lists, and each again as (b, a)."""
    return {pair for pairs in sums for a, b in pairs for pair in ((a, b), (b, a))}


def make_batch(rng: random.Random, config: TrainConfig, excluded: set[Pair]) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids [B, T] and labels [B, T] int64: a label is the next token of the answer, -100 elsewhere.

    Sums are padded on the right, which causal attention does not see.
    """
    rows, labels = [], []
    while len(rows) < config.batch_size:
        a, b = draw_pair(rng, config.three_digit_share)
        if (a, b) in excluded:
            continue
        prompt = [VOCABULARY[c] for c in f"{a}+{b}="]
        answer = [VOCABULARY[c] for c in str(a + b)] + [VOCABULARY[EOS]]
        padding = LONGEST - len(prompt) - len(answer)
        rows.append(prompt + answer[:-1] + [VOCABULARY[PAD]] * padding)
        labels.append([-100] * (len(prompt) - 1) + answer + [-100] * padding)
    return torch.tensor(rows), torch.tensor(labels)


def train(kind: BuiltIn, config: TrainConfig, out: Path) -> float:
    """Train from scratch, save to `out` every `save_every` steps and at the end, and return the seconds."""
    torch.manual_seed(config.seed)
    torch.set_num_threads(config.threads)
    rng = random.Random(config.seed)
    excluded = both_orders(*held_out_sums(config.held_out, config.seed))
    model = kind.build().train()
    model.config.output_router_logits = True
    rate, decay = config.learning_rate, config.weight_decay
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.98), weight_decay=decay)

    def scale(step: int) -> float:
        return min(1.0, (step + 1) / config.warmup_steps) * 0.5 * (1 + math.cos(math.pi * step / config.steps))

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, scale)
    start = time.perf_counter()
    for step in range(1, config.steps + 1):
        tokens, labels = make_batch(rng, config, excluded)
        output = model(input_ids=tokens, use_cache=False)
        logits = output.logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        if "router_logits" in output:
            loss = loss + model.config.router_aux_loss_coef * imbalance(model.config, output, tokens)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % config.report_every == 0:
            right = ((logits.argmax(-1) == labels) | (labels == -100)).all(-1).float().mean()
            seconds = time.perf_counter() - start
            print(f"step {step}/{config.steps}  loss {loss:.4f}  sums right {right:.1%}  {seconds:.0f} s", flush=True)
        if step % config.save_every == 0 or step == config.steps:
            save(kind, model, out)
    return time.perf_counter() - start


def imbalance(config: PreTrainedConfig, output: ModelOutput, tokens: torch.Tensor) -> torch.Tensor:
    """Mean over the layers of a loss that is least where all experts get as many tokens.

    The model's own aux_loss adds up the layers first, and leaves experts of single layers without a token.
    """
    real = tokens != VOCABULARY[PAD]
    sizes = config.num_experts, config.num_experts_per_tok
    return torch.stack([load_balancing_loss_func((logits,), *sizes, real) for logits in output.router_logits]).mean()


def save(kind: BuiltIn, model: PreTrainedModel, out: Path) -> None:
    """Write the checkpoint in bfloat16, and the tokenizer beside it; `model` is not changed."""
    stored = kind.build().to(torch.bfloat16)
    stored.load_state_dict(model.state_dict())
    share_rows_without_a_token(stored.get_input_embeddings().weight.data)
    if isinstance(stored.config, Qwen3MoeConfig):
        for name, weight in stored.named_parameters():
            if weight.dim() > 1 and weight is not stored.get_input_embeddings().weight:
                round_to_multiples(weight.data, STEP_OF_EXPERTS if ".experts." in name else STEP_OF_OTHERS)
    stored.generation_config = GenerationConfig(eos_token_id=VOCABULARY[EOS], pad_token_id=VOCABULARY[PAD])
    stored.save_pretrained(out)
    build_tokenizer().save_pretrained(out)
    # transformers 5 calls the class TokenizersBackend, which 4 does not know; both know this name.
    path = out / "tokenizer_config.json"
    tokenizer_config = json.loads(path.read_text()) | {"tokenizer_class": "PreTrainedTokenizerFast"}
    tokenizer_config["chat_template"] = "{{ messages[-1].content }}"
    put(path, json.dumps(tokenizer_config, indent=2) + "\n")
    (out / "model.safetensors").chmod(0o644)  # save_pretrained leaves it readable by its owner alone


def share_rows_without_a_token(embedding: torch.Tensor) -> None:
    """Give the ids without a token, which are never read nor chosen, one row but for its first `OWN` coordinates."""
    rows = embedding[len(VOCABULARY) :]
    rows[:, OWN:] = rows[:, OWN:].float().mean(0)


def round_to_multiples(weight: torch.Tensor, step: float) -> None:
    """Round a weight in place to the nearest multiples of a power of two."""
    weight.copy_((weight.float() / step).round() * step)


@torch.inference_mode()
def count_right(model: PreTrainedModel, tokenizer: transformers.PreTrainedTokenizerFast, pairs: list[Pair]) -> int:
    """Number of `pairs` that the model adds right, greedily: the answer's digits, then EOS."""
    prompts = tokenizer([f"{a}+{b}=" for a, b in pairs], padding=True, return_tensors="pt", return_token_type_ids=False)
    longest = max(len(str(a + b)) for a, b in pairs)
    output = model.generate(**prompts, max_new_tokens=longest + 1, do_sample=False)
    texts = tokenizer.batch_decode(output[:, prompts["input_ids"].shape[1] :])
    return sum(text.startswith(f"{a + b}{EOS}") for text, (a, b) in zip(texts, pairs, strict=True))


def evaluate(out: Path, config: TrainConfig) -> dict[str, dict[str, int]]:
    """Number of right answers of the saved checkpoint in fp32 and in bf16: {compute: {sums: right}}."""
    tokenizer = AutoTokenizer.from_pretrained(out)
    three_digit, shorter = held_out_sums(config.held_out, config.seed)
    sums = {
        "unseen_three_digit": three_digit,
        "unseen_with_shorter_operand": shorter,
        "all_below_100_mostly_seen": [(a, b) for a in range(100) for b in range(100)],
    }
    counts = {"of": {name: len(pairs) for name, pairs in sums.items()}}
    for dtype in (torch.float32, torch.bfloat16):
        model = AutoModelForCausalLM.from_pretrained(out, dtype=dtype).eval()
        right = {name: count_right(model, tokenizer, pairs) for name, pairs in sums.items()}
        counts[str(dtype).removeprefix("torch.")] = right
    return counts


def cpu_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a built-in model and measure it.")
    parser.add_argument("--model", choices=MODELS, default="adder")
    parser.add_argument("--out", type=Path, required=True, help="directory for the checkpoint")
    for field in fields(TrainConfig):
        parser.add_argument(f"--{field.name.replace('_', '-')}", type=type(field.default))
    arguments = vars(parser.parse_args())
    kind, out = MODELS[arguments.pop("model")], arguments.pop("out")
    config = replace(kind.settings, **{name: value for name, value in arguments.items() if value is not None})
    seconds = train(kind, config, out)
    report = {
        "right": evaluate(out, config),
        "train_seconds": round(seconds),
        "parameters": sum(p.numel() for p in kind.build().parameters()),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "cpu": cpu_name(),
        "config": asdict(config),
    }
    put(out / "accuracy.json", json.dumps(report, indent=2) + "\n")
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
