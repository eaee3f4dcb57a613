"""MTP heads of Qwen3-Next and Qwen3.5, which transformers leaves out: drafts are those of plain torch around a layer of it."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional as F

from tests.against_transformers import FAMILIES
from tests.engine.draft_heads import Target, drafts_after, random_tensors, with_stacked_experts
from tests.engine.test_hidden_drafts import MTP, draft
from weft.engine import SamplingParams

HIDDEN, ATTENDING = 48, 1  # hidden_size, and the layer with attention
PROMPTS = [[5, 9, 200, 7, 31], [44] * 18]


class PlainHead:
    """mtp.* by its description: fc of two norms side by side, a layer with attention, a norm; norms by 1 + weight."""

    def __init__(self, target, tensors):
        self.target, self.tensors = target, tensors
        self.model, config = target.model.model, target.model.config
        layer = type(self.model.layers[ATTENDING])(config, ATTENDING)
        named = {
            name.removeprefix("mtp.layers.0."): x for name, x in tensors.items() if name.startswith("mtp.layers.0.")
        }
        layer.load_state_dict(with_stacked_experts(named))
        self.layer, self.eps = layer.eval(), config.rms_norm_eps

    def norm(self, x, name):
        return F.rms_norm(x, (HIDDEN,), 1 + self.tensors[f"mtp.{name}.weight"], self.eps)

    def given(self, states):
        return states[-1]

    @torch.no_grad()
    def rows(self, tokens, hidden):
        embedded = self.norm(self.target.embedding[tokens], "pre_fc_norm_embedding")
        both = torch.cat((embedded, self.norm(hidden, "pre_fc_norm_hidden")), 1)
        x = F.linear(both, self.tensors["mtp.fc.weight"])[None]
        length = len(tokens)
        positions = torch.arange(length)[None]
        mask = torch.full((length, length), -torch.inf).triu(1)[None, None]
        angles = self.model.rotary_emb(x, positions)
        x = self.layer(x, position_embeddings=angles, attention_mask=mask, position_ids=positions)
        x = self.norm((x[0] if isinstance(x, tuple) else x)[0], "norm")
        return x, F.linear(x, self.target.head)


def with_head(made, directory):
    """Write the checkpoint with a random head to `directory`; returns the head's tensors."""
    shutil.copytree(made, directory)
    tensors = {}
    for path in directory.glob("*.safetensors"):
        tensors |= load_file(path)
        path.unlink()
    (directory / "model.safetensors.index.json").unlink(missing_ok=True)
    prefix = f"model.layers.{ATTENDING}."
    layer = {f"mtp.layers.0.{name.removeprefix(prefix)}": x.shape for name, x in tensors.items() if prefix in name}
    parts = {f"mtp.{name}.weight": (HIDDEN,) for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")}
    shapes = {name.removesuffix(".weight"): x for name, x in (layer | parts).items()} | {"mtp.fc": (HIDDEN, 2 * HIDDEN)}
    head = random_tensors(shapes, 5)
    save_file(tensors | head, directory / "model.safetensors")
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"mtp_num_hidden_layers": 1}))
    return head


@pytest.mark.parametrize(
    ("family", "world_size", "engine"),
    [
        ("qwen3.5", 1, {}),
        ("qwen3.5", 2, {}),
        ("qwen3-next", 2, {}),
        ("qwen3.5-moe", 1, {}),
    ],
    ids=str,
)
def test_drafts_are_those_of_plain_torch(make_checkpoint, tmp_path, family, world_size, engine):
    made, _ = make_checkpoint(**FAMILIES[family])
    params = [SamplingParams(max_tokens=7, temperature=0.5 * index, seed=3, ignore_eos=True) for index in range(2)]
    [(plain, *_)] = draft(made, PROMPTS, params)
    answers = [prompt + one.token_ids for prompt, one in zip(PROMPTS, plain, strict=True)]
    head = with_head(made, tmp_path / "with_head")
    target = Target(tmp_path / "with_head")
    reference = PlainHead(target, head)
    results = draft(tmp_path / "with_head", PROMPTS, params, world_size, speculative=MTP, answers=answers, **engine)
    for completions, noted, counts, _ in results:
        assert completions == plain and counts.accepted_tokens > 0 and noted
        for tokens, one, proposed in noted:
            assert proposed == drafts_after(reference, target, tokens, len(proposed), one)
