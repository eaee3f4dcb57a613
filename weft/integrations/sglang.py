"""weft in SGLang: the fused GEMMs of its sequence-parallel prompts, by a general plugin.

    WEFT_SGLANG=1 python -m sglang.launch_server --model-path NAME --tp 2 --enable-layernorm-sp

SGLang finds ``register`` by the entry point ``sglang.srt.plugins`` in its scheduler processes. From 0.5.19 on, prompts of the
models that its layernorm sequence parallelism knows call torch's fused symm_mem ops, which ``weft.integrations.torch`` runs on
weft.
"""

from __future__ import annotations

from typing import Any

from weft.runtime.environment import sglang_is_asked_for
from weft.runtime.logs import logger_of

__all__ = ["register"]
logger = logger_of(__name__)


def register() -> None:
    """Have SGLang's workers install weft once their groups exist, if WEFT_SGLANG=1."""
    if not sglang_is_asked_for():
        return
    try:
        from sglang.srt.distributed import bootstrap
    except ImportError:
        bootstrap = None
    if not hasattr(bootstrap, "initialize_layernorm_sp"):
        logger.warning("WEFT_SGLANG=1: this SGLang has no layernorm sequence parallelism; weft needs 0.5.19 or newer")
        return
    theirs = bootstrap.initialize_layernorm_sp
    if hasattr(theirs, "by_weft"):
        return

    def initialize_layernorm_sp(**options: Any) -> None:
        theirs(**options)
        _install()

    initialize_layernorm_sp.by_weft = True  # type: ignore[attr-defined]
    bootstrap.initialize_layernorm_sp = initialize_layernorm_sp


def _install() -> None:
    """Run torch's fused ops of the tensor-parallel group on weft, where the model uses them. Collective."""
    from sglang.srt.layers.layernorm_sp import layernorm_sp_enabled
    from sglang.srt.runtime_context import get_parallel

    from weft.integrations.torch import install

    if not layernorm_sp_enabled():
        logger.warning("WEFT_SGLANG=1: left to SGLang: --enable-layernorm-sp is off, or does not know this model")
        return
    group = get_parallel().tp_group
    if group.world_size > 1 and install(group.device_group):
        logger.info("WEFT_SGLANG=1: fused GEMMs of prompts run on weft")
