"""The same answers in fewer steps: drafted tokens are verified several at a time.

Prompt look-up drafts what followed before; an EAGLE-3 head and an MTP head draft by hidden states of the model. These heads
have random weights here, so their drafts are seldom accepted: they change no answer.

python examples/speculative_answers.py    on all GPUs, or on four virtual ranks if there are none
"""

from __future__ import annotations

import weft
from weft.models import Eagle3Config, Qwen3Config

SIZES = {
    "vocab_size": 64, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 8, "num_key_value_heads": 4,
    "head_dim": 16, "rms_norm_eps": 1e-6, "rope_theta": 1e4, "max_position_embeddings": 256, "torch_dtype": "float32",
}  # fmt: skip
# Greedy answers of small random weights repeat themselves soon, as code and summaries repeat their prompts.
MODEL = Qwen3Config.from_dict({**SIZES, "model_type": "qwen3", "num_hidden_layers": 3, "tie_word_embeddings": True})
HEAD = Eagle3Config.from_dict(
    {
        **SIZES,
        "architectures": ["LlamaForCausalLMEagle3"],
        "num_hidden_layers": 1,
        "draft_vocab_size": 32,
        "eagle_aux_hidden_state_layer_ids": [0, 1, 2],
    }
)
# Of a model as small as this one a step without drafts takes too little time for drafts to pay: `adaptive` would draft none.
DRAFTING = [
    {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1, "adaptive": False},
    {"method": "eagle3", "num_speculative_tokens": 2, "model": HEAD, "adaptive": False},
    {"method": "mtp", "num_speculative_tokens": 2, "adaptive": False},
]
PROMPTS = [[5, 6, 7, 5, 6, 7, 5], [1, 2, 3]]


def main(team: weft.Team) -> str:
    """Answer with and without drafts on each rank; what rank 0 says."""
    answers, lines = [], []
    for speculative in (None, *DRAFTING):
        engine = weft.Engine(MODEL, team, mode="reference", page_size=16, speculative=speculative, warn=False)
        answers.append([one.token_ids for one in engine.generate(PROMPTS, max_tokens=40)])
        assert answers[0] == answers[-1], "drafts change no answer"
        if speculative is not None:
            counts = engine.stats.speculation
            lines.append(
                f"{speculative['method']}: equal answers; {counts.accepted_tokens} of {counts.draft_tokens} drafted tokens "
                f"accepted, {counts.tokens_per_draft:.2f} tokens a step with drafts"
            )
    return "\n".join(lines)


if __name__ == "__main__":
    print(weft.launch(main)[0])
