"""VaultGemma, Gemma 2 without norms after attention and MLP: the tables of its family."""

from __future__ import annotations

from dataclasses import replace

from weft.models.family import BlockOptions, Content, Family
from weft.models.gemma2 import GEMMA2, SUPPORTED


def block(content: Content) -> BlockOptions:
    return replace(GEMMA2.block(content), norms_after=False)


VAULTGEMMA = Family(
    name="VaultGemma",
    model_type="vaultgemma",
    architecture="VaultGemmaForCausalLM",
    defaults=GEMMA2.defaults,
    attention=GEMMA2.attention,
    block=block,
    reads=GEMMA2.reads,
    supported=SUPPORTED,
    weights=GEMMA2.weights,
    published={},
)
