"""A trainer's forward pass in mode "invariant": the bits of the engine's log-probabilities, with gradients."""

import pytest
import torch

import weft
from tests.ops.checking import assert_identical
from weft.engine import Engine
from weft.layers import replace, token_logprobs

transformers = pytest.importorskip("transformers")

SIZES = {
    "vocab_size": 60, "hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 8,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 64, "bos_token_id": 1, "eos_token_id": None,
    "pad_token_id": None, "tie_word_embeddings": False,
}  # fmt: skip
# Heads and features of a GPU's usual tiles.
LARGER = SIZES | {
    "vocab_size": 512,
    "hidden_size": 1024,
    "intermediate_size": 2048,
    "num_hidden_layers": 2,
    "num_key_value_heads": 4,
    "head_dim": 128,
}
PROMPTS = torch.randint(0, 60, (2, 21), generator=torch.Generator().manual_seed(0))


def model_of(kind="Qwen3", sizes=SIZES):
    torch.manual_seed(0)
    sizes = sizes if kind == "Qwen3" else {name: size for name, size in sizes.items() if name != "head_dim"}
    model = getattr(transformers, f"{kind}ForCausalLM")(getattr(transformers, f"{kind}Config")(**sizes)).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(torch.randn(weight.shape) * 0.2 + (weight.dim() == 1))
    return model.bfloat16()


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    path = tmp_path_factory.mktemp("invariant")
    model_of().save_pretrained(path)
    return path


def trained(team, sizes=SIZES):
    """(log-probabilities of the prompts' tokens, gradients of some weights)"""
    model = model_of(sizes=sizes).to(team.device)
    replace(model, team, mode="invariant")
    prompts = PROMPTS.to(team.device)
    logits = model(prompts, use_cache=False).logits
    logprobs = token_logprobs(logits[:, :-1], prompts[:, 1:])
    logprobs.sum().backward()
    layer = model.model.layers[0]
    weights = model.model.norm.weight, model.lm_head.weight, layer.mlp.layer.down_proj.weight
    return logprobs.detach().cpu(), [weight.grad.cpu() for weight in weights]


def scored(team, directory):
    """The engine's, of prompts read in chunks."""
    engine = Engine(directory, team, invariant=True, chunk_tokens=8, page_size=16, max_batch=2)
    completions = engine.generate([one.tolist() for one in PROMPTS], max_tokens=1, prompt_logprobs=0)
    return torch.tensor(
        [
            [
                likely[token].logprob
                for token, likely in zip(one.tolist()[1:], completion.prompt_logprobs[1:], strict=True)
            ]
            for one, completion in zip(PROMPTS, completions, strict=True)
        ]
    )


def test_a_trainer_computes_the_engines_log_probabilities_bit_for_bit(directory):
    [expected] = weft.simulate(scored, 1, args=(directory,))
    for world_size in (1, 2):
        by_rank = weft.simulate(trained, world_size)
        for logprobs, _ in by_rank:
            assert_identical(logprobs, expected, what=f"{world_size} ranks")


@pytest.mark.gpu(2)
def test_on_gpus_a_trainer_computes_the_engines_log_probabilities_bit_for_bit(tmp_path):
    model_of(sizes=LARGER).save_pretrained(tmp_path)
    [expected] = weft.launch(scored, 1, "cuda", args=(tmp_path,))
    for world_size in (1, 2):
        by_rank = weft.launch(trained, world_size, "cuda", args=(LARGER,))
        for logprobs, gradients in by_rank:
            assert_identical(logprobs, expected, what=f"{world_size} GPUs")
            assert all(gradient.isfinite().all() and gradient.abs().sum() > 0 for gradient in gradients)


def test_gradients_are_those_of_the_untouched_model():
    model = model_of()
    logits = model(PROMPTS, use_cache=False).logits[:, :-1].float().log_softmax(-1)
    logits.gather(2, PROMPTS[:, 1:, None]).sum().backward()
    [(_, gradients)] = weft.simulate(trained, 1)
    expected = model.model.norm.weight.grad, model.lm_head.weight.grad, model.model.layers[0].mlp.down_proj.weight.grad
    for one, other in zip(gradients, expected, strict=True):
        assert (one - other).norm() < 0.03 * other.norm()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "pass use_cache=False, and generate with weft.LLM"),
        ({"attention_mask": torch.tensor([[0, 1], [1, 1]])}, "pad on the right, or pass none"),
        ({"position_ids": torch.tensor([[1, 2], [0, 1]])}, "position_ids do not count from 0"),
    ],
)
def test_calls_that_it_does_not_compute_are_refused(options, message):
    def main(team):
        model = model_of()
        replace(model, team, mode="invariant")
        model(PROMPTS[:, :2], **options)

    with pytest.raises(ValueError, match=message):
        weft.simulate(main, 1)
