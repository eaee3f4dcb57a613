"""Logits and greedy tokens of weft's models beside those of transformers."""

import torch

from tests.teacher_forced import all_logits
from weft.engine import Runner, SamplingParams
from weft.engine.config import EngineConfig
from weft.engine.prefill import PrefillChunk
from weft.engine.runner import SlotState
from weft.models import Decoder

TOLERANCE = 1e-5  # relative RMS of fp32 logits on a CPU


def prompt(batch, length, seed=0):
    return torch.randint(257, (batch, length), generator=torch.Generator().manual_seed(seed))


def relative_rms(found, expected):
    return ((found.float() - expected).square().mean() / expected.square().mean()).sqrt().item()


def reference_logits(model, tokens):
    with torch.no_grad():
        return model(tokens).logits


def reference_greedy(model, tokens, steps):
    with torch.no_grad():
        return model.generate(tokens, do_sample=False, max_new_tokens=steps, use_cache=True)[:, tokens.shape[1] :]


def greedy(model, prompts, steps):
    """[steps, batch] greedy tokens of our model, by prefill and then decode."""
    runner = Runner(model, EngineConfig(max_batch=len(prompts), page_size=16, max_seq_len=128))
    params = SamplingParams()
    pages = [list(range(1 + 8 * slot, 9 + 8 * slot)) for slot in range(len(prompts))]
    runner.prefill(
        [
            PrefillChunk(slot=slot, tokens=prompt, before=0, pages=pages[slot], params=params, choose=True)
            for slot, prompt in enumerate(prompts)
        ]
    )
    tokens = [runner.tokens.clone()]
    for step in range(steps - 1):
        runner.assign_slots(
            {
                slot: SlotState(position=len(prompt) + step, pages=pages[slot], params=params)
                for slot, prompt in enumerate(prompts)
            }
        )
        runner.decode()
        tokens.append(runner.tokens.clone())
    return torch.stack(tokens)


def check_logits_and_tokens(team, directory, mode, tokens, steps, fused=False):
    model = Decoder.from_pretrained(directory, team, mode=mode, fused=fused)
    return all_logits(model, tokens), greedy(model, tokens.tolist(), steps) if steps else None
