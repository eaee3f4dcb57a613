"""Complete generations, from prompts to tokens on the host, by weft's Engine and by the baseline.

Timed by the host's clock.

Time to first token: until the first token of every prompt is on the host. Time per later token: the time from then on, over the
tokens of one sequence. Providers run separately, since their memory does not fit together.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from weft.bench.harness.meters import Spread, capturing, finish, spread
from weft.bench.harness.provider import Prepared, Verdict
from weft.bench.harness.workload import Problem, Shape, together
from weft.bench.models.baseline import Functions
from weft.bench.models.problem import StepProblem
from weft.bench.models.sessions import TorchSession
from weft.engine import Engine
from weft.engine.params import SamplingParams
from weft.errors import WeftError
from weft.runtime.codec import exchangeable

if TYPE_CHECKING:
    from weft.engine.speculation.options import SpeculativeConfig
    from weft.layers.moe import Layout
    from weft.models.config import DecoderConfig
    from weft.runtime.team.team import Team

# (prompt, token), in order of arrival on the host.
Tokens = Iterator[Sequence[tuple[int, int]]]
ROUNDS, QUICK_ROUNDS = 5, 3
# A token passes if its logit is at most CLOSE times `StepProblem.limit` below the best, in RMS of the logits. This allows
# near-ties, often the runner-up: of 150,000 random ids it lies 0.2 RMS below. A random token lies about 4.5 below and fails.
CLOSE = 6.0
# Tokens that eager torch reads at once in the check of answers, where each answer's logits are needed after every token.
CHECKED_TOKENS = 8192
CHECK = "every token of every answer, given those before it, is eager torch's likeliest one, within rounding"
COUNTED = "answers of the right lengths, compared with nothing"


@exchangeable
@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """Seconds of one round on one rank."""

    first: float
    each: float
    whole: float


class AnswersProblem(Problem):
    """Prompts [batch, length] and weights, equal for all providers, and the check of their answers.

    compares  tokens with the eager baseline's choices; else answers are only counted
    """

    alone = True
    replicas = 1

    def __init__(
        self,
        shape: Shape,
        config: DecoderConfig,
        dtype: str,
        team: Team,
        expert_layout: Layout | None = None,
        speculative: SpeculativeConfig | None = None,
        compares: bool = True,
    ) -> None:
        self.speculative, self.expert_layout, self.compares = speculative, expert_layout, compares
        self.shape, self.team, self.sets = shape, team, [0]
        self.batch, self.length, self.new = shape.size
        prefill = Shape(size=(self.batch, self.length, self.length), label=shape.label)
        self.of_step = StepProblem("model", prefill, config, dtype, team, expert_layout=expert_layout)
        self.prompts = self.of_step.step.tokens

    def expect(self) -> None:
        if not self.compares:
            return
        what = f"eager torch at {self.shape.label}"
        distance = together(self.team, self.of_step.distance_to_fp32, launches=what)
        self.of_step.agree(self.team.exchange(distance))

    def check(self, prepared: Prepared, out: tuple[Times, list[list[int]]], what: str) -> Verdict:
        answers = out[1]
        if lacking := next(filter(None, self.team.exchange(self.lacking(answers))), ""):
            return Verdict(wrong=lacking)
        if not self.compares:
            return Verdict()
        checker = together(self.team, lambda: self.checker(answers))
        seen = together(self.team, checker, launches=f"eager torch's check of {what}")
        return Verdict(wrong=self.wrong(self.team.exchange(seen)))

    def time(self, prepared: Prepared, what: str, quick: bool) -> dict[str, Any]:
        times: list[Times] = []
        for _ in range(1 if self.team.is_simulated else rounds_of(quick)):
            self.team.barrier()
            times.append(together(self.team, lambda: prepared.run(0), launches=what)[0])
        return timed(self.team.exchange(times), self.batch * self.new)

    def lacking(self, answers: list[list[int]]) -> str:
        """First answer with a wrong number of tokens; "" if there is none."""
        return next(
            (f"prompt {i}: {len(a)} tokens, not {self.new}" for i, a in enumerate(answers) if len(a) != self.new), ""
        )

    def checker(self, answers: list[list[int]]) -> Callable[[], torch.Tensor]:
        """Allocate the buffers to check ``answers``. The returned call runs eager torch over them.

        It gives this rank's data before each token, [3, batch * new] on the host: its largest logit, the logit of the given
        token (-inf if it is another rank's), and the sum of the squares of its logits.
        """
        model = self.of_step.baseline
        given = torch.tensor(answers, device=self.team.device)
        tokens = torch.cat((self.prompts, given[:, :-1]), dim=1)
        at_once = max(1, CHECKED_TOKENS // tokens.shape[1])
        groups = list(zip(tokens.split(at_once), given.split(at_once), strict=True))
        # Two at most: the last group may be smaller.
        sessions = {size: TorchSession(model, size, tokens.shape[1]) for size in {len(group) for group, _ in groups}}

        def seen() -> torch.Tensor:
            parts = [self.seen_of(sessions[len(group)], group, chosen) for group, chosen in groups]
            return torch.cat(parts, dim=1).cpu()

        return seen

    def seen_of(self, session: TorchSession, tokens: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
        """Data of `checker` for some of the sequences, [3, sequences * new].

        given   [sequences, new]: their answers
        tokens  [sequences, length + new - 1]: prompts and answers without the last tokens
        """
        model, (count, longest) = session.model, tokens.shape
        # After the last token of each prompt, and after each given token but the last.
        rows = torch.arange(count, device=tokens.device)[:, None] * longest
        rows = rows + torch.arange(self.length - 1, longest, device=tokens.device)
        logits = session.prefill(tokens, session.prompts(longest), rows.flatten())[:, : model.real]
        local = given.flatten() - model.start
        is_here = (local >= 0) & (local < logits.shape[1])
        taken = logits.gather(1, local.clamp(0, logits.shape[1] - 1)[:, None])[:, 0]
        taken = taken.masked_fill(~is_here, float("-inf"))
        return torch.stack((logits.max(dim=1).values, taken, logits.square().sum(dim=1)))

    def wrong(self, all_ranks: Sequence[torch.Tensor]) -> str:
        """Reason why the answers are wrong; "" if every token is eager torch's choice, within rounding.

        ``all_ranks``: results of all ranks' `checker`.
        """
        seen = torch.stack(list(all_ranks))
        best, taken = seen[:, 0].amax(0), seen[:, 1].amax(0)
        scale = (seen[:, 2].sum(0) / self.of_step.config.vocab_size).sqrt()
        below = ((best - taken) / scale).view(self.batch, self.new)
        limit = CLOSE * self.of_step.limit
        if float(below.max()) <= limit:
            return ""
        row, place = divmod(int(below.argmax()), self.new)
        worst = f"{float(below.max()):.2g} RMS below eager torch's choice, more than {limit:.2g}"
        return f"prompt {row}: token {place} lies {worst}"


# --- providers ---------------------------------------------------------------------------------------------------------


def weft(problem: AnswersProblem, mode: str) -> Prepared:
    """Engine with as many batch slots as prompts.

    It makes random weights, which the baseline then uses.
    """
    problem.of_step.share(None)
    gc.collect()  # the previous engine is freed, with its weights
    engine = Engine(
        problem.of_step.config, problem.team, mode=mode, dtype=problem.of_step.dtype, max_batch=problem.batch,
        max_seq_len=problem.length + problem.new, pages=1 + problem.batch * -(-(problem.length + problem.new) // 64),
        speculative=problem.speculative, expert_layout=problem.expert_layout,
        prefix_caching=False,  # each round asks for the same prompts
    )  # fmt: skip
    problem.of_step.share(engine.model)
    prompts = problem.prompts.tolist()
    params = [SamplingParams(max_tokens=problem.new, ignore_eos=True)] * problem.batch

    def answers() -> Tokens:
        for pieces in engine.answer_in_steps(prompts, params):
            for piece in pieces:
                if piece.error is not None:
                    raise WeftError(f"prompt {piece.prompt}: {piece.error.message}")
            yield [(piece.prompt, piece.token_id) for piece in pieces]

    return answering(problem, answers)


def eager(problem: AnswersProblem) -> Prepared:
    session = TorchSession(problem.of_step.baseline, problem.batch, problem.length + problem.new)
    return answering(problem, TorchAnswers(problem, session, session))


def decode_by(problem: AnswersProblem, functions: Functions) -> Prepared:
    """Prompts eagerly, tokens by ``functions``, compiled for steps of the batch: gpt-fast's default."""
    model, longest = problem.of_step.baseline, problem.length + problem.new
    writer = TorchSession(model, problem.batch, longest, functions)
    reader = TorchSession(model, problem.batch, longest)
    reader.recall(writer.cache, longest)
    return answering(problem, TorchAnswers(problem, reader, writer))


def answering(problem: AnswersProblem, answers: Callable[[], Tokens]) -> Prepared:
    return Prepared(run=lambda number: drawn(problem, answers))


class TorchAnswers:
    """Prompts by one session, then tokens by another with the same cache, each step one CUDA graph.

    The next step is launched before the host waits for the tokens of this one, as in an engine.
    """

    def __init__(self, problem: AnswersProblem, reader: TorchSession, writer: TorchSession) -> None:
        self.problem, self.reader, self.writer = problem, reader, writer
        device, self.on_gpu = problem.team.device, problem.team.device.type == "cuda"
        self.tokens = torch.zeros(problem.batch, dtype=torch.int64, device=device)
        self.positions = torch.full((problem.batch,), problem.length, device=device)
        self.host = torch.empty(problem.new, problem.batch, dtype=torch.int64, pin_memory=self.on_gpu)
        self.graph: torch.cuda.CUDAGraph | None = None
        if self.on_gpu:
            self.step()
            finish(problem.team, "the first step of a baseline")
            graph = torch.cuda.CUDAGraph()
            with capturing(graph):
                self.step()
            self.graph = graph

    def step(self) -> None:
        logits = self.writer.decode(self.tokens, self.positions)
        self.tokens.copy_(self.writer.choose(logits))
        self.positions.add_(1)

    def launch(self, place: int) -> torch.cuda.Event | None:
        if place == 0:
            at = self.reader.prompts(self.problem.length)
            self.tokens.copy_(self.reader.choose(self.reader.prefill(self.problem.prompts, at)))
            self.positions.fill_(self.problem.length)
        elif self.graph is not None:
            self.graph.replay()
        else:
            self.step()
        self.host[place].copy_(self.tokens, non_blocking=True)
        if not self.on_gpu:
            return None
        copied = torch.cuda.Event()
        copied.record()
        return copied

    def __call__(self) -> Tokens:
        copied = self.launch(0)
        for place in range(self.problem.new):
            arrived = copied
            if place + 1 < self.problem.new:
                copied = self.launch(place + 1)
            if arrived is not None:
                arrived.synchronize()
            yield list(enumerate(self.host[place].tolist()))


# --- measuring ---------------------------------------------------------------------------------------------------------


def rounds_of(quick: bool) -> int:
    return QUICK_ROUNDS if quick else ROUNDS


def protocol(quick: bool) -> dict[str, Any]:
    """Description of the timing on GPUs, for the JSON."""
    return {
        "timing": "the host's clock, from a barrier of all ranks to the tokens on the host",
        "alternation": "none: each provider makes one answer, which is checked and not timed, and then all rounds",
        "rounds": f"{rounds_of(quick)} of whole answers",
        "data": "random weights and prompts, the same for all providers and rounds",
        "statistic": "of the rank with the largest median; p10 and p90 are that rank's fastest and slowest round",
    }


def timed(all_ranks: Sequence[Sequence[Times]], tokens: int) -> dict[str, Any]:
    """Fields of a row with its times. ``all_ranks``: each rank's rounds, of ``tokens`` in all.

    Every time is of the rank with the largest median; p10 and p90 of so few rounds are its fastest and its slowest round.
    """

    def slowest(pick: Callable[[Times], float]) -> Spread:
        return max((spread([pick(times) * 1e6 for times in ranks]) for ranks in all_ranks), key=lambda s: s.median)

    each, whole = slowest(lambda t: t.each), slowest(lambda t: t.whole)
    return {
        "median_us": each.median, "p10_us": each.p10, "p90_us": each.p90, "samples": each.samples,
        "first_us": slowest(lambda t: t.first).median, "tokens_per_second": tokens / whole.median * 1e6,
    }  # fmt: skip


def drawn(problem: AnswersProblem, answers: Callable[[], Tokens]) -> tuple[Times, list[list[int]]]:
    answered: list[list[int]] = [[] for _ in range(problem.batch)]
    first_at, by_then, total = 0.0, 0, 0
    begin = time.perf_counter()
    for arrived in answers():
        for prompt, token in arrived:
            answered[prompt].append(token)
        total += len(arrived)
        if not first_at and all(answered):
            # An engine's first step prefills and decodes: two tokens of a prompt may arrive together.
            first_at, by_then = time.perf_counter(), total
    end = time.perf_counter()
    later = total - by_then
    each = (end - first_at) * problem.batch / later if later else (end - begin) / problem.new
    return Times(first=first_at - begin, each=each, whole=end - begin), answered
