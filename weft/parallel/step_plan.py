"""How one forward pass is computed: the one place that chooses, by the number of its tokens, and says why."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

import torch

from weft.arguments import quoted
from weft.ops.collectives.all_reduce_rms_norm import MAX_ROW_BYTES
from weft.ops.dispatch import of_world

if TYPE_CHECKING:
    from weft.runtime.team import Team

Mode = Literal["torch", "ag_rs", "gemm_ar", "auto"]
MODES: tuple[str, ...] = get_args(Mode)

# From so many tokens on "auto" splits them over the ranks (ag_rs): only then are the GEMMs long enough to hide the
# communication. Decoding stays below. Figures of both limits: docs/decisions.md, "Modes".
SHARDED_TOKENS = 2048
# Up to so many tokens the all-reduce waits for the norm behind it (one kernel), by world size: the GEMM before it is too short
# to hide it. Measured on two.
DEFERRED_TOKENS = {2: 1024, 4: 512}


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How the layers of one forward pass work together.

    mode      "torch", "ag_rs" or "gemm_ar" (weft.parallel.linear)
    fused     local work between GEMMs in weft.ops' kernels; else in torch operations
    deferred  of "gemm_ar": a row-parallel layer leaves this rank's partial sums, and the norm after it adds them up over
              the ranks (all_reduce_rms_norm); else its result is whole (matmul_all_reduce)
    factored  of deferred: the rows' root mean squares are divided out in or behind the GEMM (weft.kernels.deferred_norm)
    reason    why, for a person
    """

    mode: Literal["torch", "ag_rs", "gemm_ar"]
    fused: bool = False
    deferred: bool = False
    factored: bool = False
    reason: str = "asked for"

    def __str__(self) -> str:
        kernels = "fused" if self.fused else "unfused"
        norm = ", all-reduce with the next norm" if self.deferred else ""
        return f"{self.mode}, {kernels}{norm}{', factored' if self.factored else ''}: {self.reason}"


def choose_plan(
    mode: Mode, tokens: int, *, hidden_size: int, dtype: torch.dtype, team: Team, fused: bool | None = None,
    factored: bool | None = None,
) -> Plan:  # fmt: skip
    """The plan for a forward pass of `tokens` tokens, all sequences together.

    mode   what was asked for; "auto" is one of the others
    fused  None: where the team is on GPUs. Mode "torch" never is
    factored  None: in bf16 on sm_90, where it was measured. Deferred plans alone are
    """
    check_mode(mode)
    if mode == "torch":
        return Plan(mode="torch", reason="asked for: cuBLAS and torch.distributed")
    fused = not team.is_simulated if fused is None else fused
    reason = "asked for"
    if mode == "auto":
        if team.size > 1 and tokens >= SHARDED_TOKENS:
            mode, reason = "ag_rs", f"{tokens} tokens >= {SHARDED_TOKENS}: the GEMMs hide gathering and scattering"
        elif team.size == 1:
            mode, reason = "gemm_ar", "one rank: nothing to send"
        else:
            mode, reason = "gemm_ar", f"{tokens} tokens < {SHARDED_TOKENS}: too few to split over {team.size} ranks"
    row_bytes = hidden_size * dtype.itemsize
    deferred = (
        mode == "gemm_ar" and fused and team.size > 1 and tokens <= of_world(DEFERRED_TOKENS, team.size)
        and row_bytes % 16 == 0 and row_bytes <= MAX_ROW_BYTES
    )  # fmt: skip
    if deferred:
        limit = of_world(DEFERRED_TOKENS, team.size)
        reason += (
            f"; {tokens} tokens <= {limit}: a product is too short to hide an all-reduce, so the norm takes it along"
        )
    if factored is None:
        factored = dtype == torch.bfloat16 and (team.is_simulated or team.caps.arch == "sm_90")
    return Plan(mode=mode, fused=fused, deferred=deferred, factored=deferred and factored, reason=reason)


def plan_alone(mode: Mode, team: Team) -> Plan:
    """For a layer that is used by itself: its input and its result are whole, so "auto" is "gemm_ar"."""
    check_mode(mode)
    return Plan(mode="gemm_ar" if mode == "auto" else mode, fused=mode != "torch" and not team.is_simulated)


def check_mode(mode: str) -> None:
    if not isinstance(mode, str) or mode not in MODES:
        raise ValueError(f"mode={quoted(mode)} is unknown; choose one of {', '.join(MODES)}")
