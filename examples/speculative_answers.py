"""The same answers in fewer steps: tokens that prompt look-up drafts, verified several at a time.

python examples/speculative_answers.py    on all GPUs, or on four virtual ranks if there are none
"""

from __future__ import annotations

import weft
from weft.models import Qwen3Config

# Greedy answers of small random weights repeat themselves soon, as code and summaries repeat their prompts.
MODEL = Qwen3Config.from_dict(
    {
        "model_type": "qwen3", "vocab_size": 64, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 16, "rms_norm_eps": 1e-6, "rope_theta": 1e4,
        "max_position_embeddings": 256, "tie_word_embeddings": True, "torch_dtype": "float32",
    }
)  # fmt: skip
PROMPTS = [[5, 6, 7, 5, 6, 7, 5], [1, 2, 3]]


def main(team: weft.Team) -> str:
    """Answer with and without drafts on each rank; what rank 0 says."""
    drafting = weft.SpeculativeConfig(num_speculative_tokens=4, prompt_lookup_min=1)
    answers = []
    for speculative in (None, drafting):
        engine = weft.Engine(MODEL, team, mode="reference", page_size=16, speculative=speculative, warn=False)
        answers.append([one.token_ids for one in engine.generate(PROMPTS, max_tokens=40)])
    assert answers[0] == answers[1], "drafts change no answer"
    counts = engine.stats.speculation
    return (
        f"equal answers; {counts.accepted_tokens} of {counts.draft_tokens} drafted tokens accepted, "
        f"{counts.tokens_per_draft:.2f} tokens a step with drafts"
    )


if __name__ == "__main__":
    print(weft.launch(main)[0])
