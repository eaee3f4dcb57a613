"""One decoder layer at one rank: weights, input, the gradient of its output, and the answers in fp32."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from weft.bench.harness.provider import Prepared, Verdict
from weft.bench.harness.workload import DTYPES, Problem, Shape, together
from weft.bench.training.recipe import answering
from weft.bench.training.shapes import LayerShape
from weft.parallel.recipe import StepPlan
from weft.parallel.rotary import rotary_angles
from weft.parallel.sequence_parallel import SequenceParallel
from weft.parallel.sequences import Sequences
from weft.parallel.tensors import AttentionWeights, MLPWeights, SequenceShard

if TYPE_CHECKING:
    from weft.runtime.team.team import Team

# Largest RMS of a tensor's error over the RMS of the tensor. Rounded at every step, a layer is 0.004 .. 0.01 from fp32 in bf16.
LIMIT = {torch.bfloat16: 0.02, torch.float16: 0.004, torch.float32: 1e-4}
EPS = 1e-6


class LayerTensors(NamedTuple):
    """This rank's rows of the input, [T/W, H], and its shares of the weights: all get gradients."""

    x: Tensor
    qkv: Tensor
    o: Tensor
    gate_up: Tensor
    down: Tensor


class TrainProblem(Problem):
    """Forward and backward of a layer: (y, gradients of LayerTensors) of this rank, given y's gradient."""

    def __init__(self, shape: Shape, dtype: str, team: Team) -> None:
        self.shape, self.team, self.dtype = shape, team, DTYPES[dtype]
        self.size = LayerShape(*shape.size)
        self.sets, self.replicas = [0], 1
        W, one = team.size, self.size
        self.heads = one.heads // W, one.kv_heads // W, one.head_dim
        generator = torch.Generator(team.device).manual_seed(team.rank)

        def draw(rows: int, columns: int, scale: float) -> Tensor:
            x = torch.randn(rows, columns, generator=generator, device=team.device)
            return (x * scale).to(self.dtype).requires_grad_()

        q, qkv, features = one.heads // W * one.head_dim, sum(self.heads[:2]) * one.head_dim, one.features // W
        self.tensors = LayerTensors(
            draw(one.tokens // W, one.hidden, 1.0),
            draw(qkv + one.kv_heads // W * one.head_dim, one.hidden, one.hidden**-0.5),
            draw(one.hidden, q, (q * W) ** -0.5),
            draw(2 * features, one.hidden, one.hidden**-0.5),
            draw(one.hidden, features, (features * W) ** -0.5),
        )
        self.grad = draw(one.tokens // W, one.hidden, 1.0).detach()
        self.angles = rotary_angles(one.length, one.head_dim, 1e6, team.device)[None]
        self._answer: tuple[Tensor, ...] = ()

    def prepared(self, recipe: SequenceParallel) -> Prepared:
        return Prepared(run=lambda number: self.run(recipe, self.tensors, self.grad))

    def run(self, recipe: SequenceParallel, t: LayerTensors, grad: Tensor) -> tuple[Tensor, ...]:
        """Layer by ``recipe``: norm, attention, norm, MLP, residuals; then all gradients, as new tensors."""
        one, norm = self.size, t.x.new_ones(self.size.hidden)
        plan = StepPlan(recipe=recipe)
        step = Sequences(plan=plan, batch=one.batch, length=one.length, angles=self.angles)
        of_head = t.x.new_ones(one.head_dim)
        attention = AttentionWeights(t.qkv, t.o, of_head, of_head, EPS, *self.heads)

        def normed(x: Tensor) -> SequenceShard:
            return SequenceShard(F.rms_norm(x, norm.shape, norm, EPS))

        h = t.x + recipe.attention(normed(t.x), attention, step, None).rows
        y = h + recipe.mlp(normed(h), MLPWeights(t.gate_up, t.down)).rows
        return (y.detach(), *torch.autograd.grad(y, t, grad))

    def expect(self) -> None:
        def answered() -> tuple[Tensor, ...]:
            wide = LayerTensors(*(x.detach().float().requires_grad_() for x in self.tensors))
            return self.run(answering(self.team), wide, self.grad.float())

        self._answer = together(self.team, answered, launches=f"the answer at {self.shape.label}")

    def verdict(self, prepared: Prepared, out: tuple[Tensor, ...]) -> Verdict:
        worst = rms = 0.0
        wrong = []
        for name, x, expected in zip(("y", *LayerTensors._fields), out, self._answer, strict=True):
            error = x.float() - expected
            relative = float(error.square().mean().sqrt() / expected.square().mean().sqrt())
            if not relative <= LIMIT[self.dtype]:
                wrong.append(f"relative RMS {relative:.3g} of {name}, more than {LIMIT[self.dtype]:g}")
            worst = max(worst, float(error.abs().max()) if math.isfinite(relative) else math.inf)
            rms = max(rms, relative)
        return Verdict(max_abs_error=worst, rms_error=rms, wrong="; ".join(wrong))

    def forget(self) -> None:
        self._answer = ()
