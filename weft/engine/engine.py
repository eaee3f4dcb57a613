"""Inference engine over all ranks of a team: a model, its tokenizer and a continuous batch."""

from __future__ import annotations

import hashlib
import secrets
import time
from collections.abc import Generator, Sequence
from concurrent.futures import Future
from contextlib import closing
from dataclasses import replace
from functools import partial
from itertools import repeat, zip_longest
from os import PathLike
from typing import Any

from tokenizers import Tokenizer

from weft.arguments import check_bool, check_callable, check_instance, check_optional, quoted
from weft.costs.gpu import agree
from weft.engine.answers import Answer, Completion, Load, Piece, Requests, Stats, join_pieces
from weft.engine.batch import Batch
from weft.engine.config import EngineConfig, plan_cache
from weft.engine.followed import Measured, ServingPlan
from weft.engine.params import (
    Prompt,
    SamplingParams,
    as_prompts,
    difference,
    one_each,
    sampling_defaults,
    unused_defaults,
)
from weft.engine.pipeline import Pipeline
from weft.engine.runner import Runner
from weft.engine.speculation.drafting import StepTimes
from weft.engine.speculation.loading import Draft, load_draft
from weft.engine.speculation.times import step_times
from weft.errors import CheckpointError
from weft.kernels.fp8 import E4M3
from weft.models import Decoder, DecoderConfig
from weft.models.builtin import PATH as BUILTIN
from weft.models.checkpoint import Checkpoint, Progress
from weft.models.config import unreached_positions
from weft.models.hub import find_checkpoint, revision_of
from weft.models.memory import check_cache
from weft.ops import warm_up
from weft.runtime.codec import encode
from weft.runtime.logs import logger_of
from weft.runtime.team.team import Team
from weft.text.tokenizer import has_tokenizer, load_tokenizer

MAX_POSITIONS = 1 << 24
logger = logger_of(__name__)


class Engine:
    """Inference engine on all ranks of `team`: text in, text out.

    Collective: all ranks pass the same arguments and get the same tokens.

    model, config, options  as for LLM
    progress  called with (bytes read, bytes to read) while this rank's weights load
    warm_up_progress  called with (graphs captured, graphs to capture) during the configuration's warm_up
    warn      rank 0 logs a line (docs/logging.md) for settings of generation_config.json that weft does not follow, for NaN or
              infinite weights, and for tensors that the model does not have

    `defaults` are the SamplingParams of the checkpoint's generation_config.json, and `cache_plan` says where keys and values
    lie, and why. CheckpointError (a ValueError) where the directory cannot be loaded, ValueError where W does not divide the
    model.
    """

    def __init__(
        self,
        model: str | PathLike[str] | DecoderConfig | None,
        team: Team,
        *,
        config: EngineConfig | None = None,
        progress: Progress | None = None,
        warm_up_progress: Progress | None = None,
        warn: bool = True,
        **options: object,
    ) -> None:
        begin = time.perf_counter()
        # All arguments are checked before the weights are read.
        check_model(model)
        check_optional(check_callable, "progress", progress, "progress(bytes read, bytes to read)")
        check_optional(check_callable, "warm_up_progress", warm_up_progress, "warm_up_progress(captured, to capture)")
        check_instance("team", team, Team, "a Team; weft.init() makes one, and main(team) gets one")
        check_bool("warn", warn)
        config = EngineConfig.of(config, options)
        checkpoint = None if isinstance(model, DecoderConfig) else _open(model, team)
        sizes = model if checkpoint is None else DecoderConfig.of(checkpoint)
        self.measured = _measured(config.plan, sizes, team)
        config = replace(config, max_seq_len=_longest(config.max_seq_len, sizes.max_position_embeddings))
        pipeline = _pipeline(config, sizes, team)
        self.cache_plan = plan_cache(config, sizes, pipeline.stage.size, pipeline.stage.shape.nodes)
        context_parallel = self.cache_plan.context_parallel
        if config.pages is not None:
            dtype = E4M3 if config.kv_cache_dtype == "fp8" else config.dtype or sizes.dtype
            pages = config.pages, config.page_size
            check_cache(sizes, pipeline.stage, dtype, *pages, layers=pipeline.layers, context_parallel=context_parallel)
        self.team, self.config = team, config
        self.tokenizer = None if checkpoint is None else _tokenizer(checkpoint, sizes.vocab_size)
        self.defaults, warnings, ends, no_text = SamplingParams(), [], frozenset(), "this model has no tokenizer"
        if checkpoint is not None:
            self.defaults = sampling_defaults(checkpoint)
            warnings = [*unused_defaults(checkpoint), *unreached_positions(checkpoint)]
            ends, no_text = checkpoint.eos_token_ids(), f"{checkpoint.directory} has no tokenizer.json"
        self.requests = Requests(team, config, sizes.vocab_size, self.tokenizer, no_text, ends)
        # The table of rotary angles has max_position_embeddings rows: as many as a sequence can need here.
        sizes = replace(sizes, max_position_embeddings=config.max_seq_len)
        names = "mode", "dtype", "fused", "expert_layout", "kv_cache_dtype", "quantization", "wire"
        options = {name: getattr(config, name) for name in names}
        self.model: Decoder = Decoder(
            sizes, pipeline.stage, layers=pipeline.layers, context_parallel=context_parallel, **options
        )
        logger.debug("start: rank %d has its model", team.rank)
        warnings += self._load(checkpoint, progress)
        if warn and team.rank == 0:
            logger.info("KV cache %s", self.cache_plan)
            for line in warnings:
                logger.warning(line)
        agree(team)  # on the measured constants of this GPU, before the first plan
        draft = load_draft(config, self.model, checkpoint, self.tokenizer, partial(_open, team=team))
        searching = partial(_search, config=config) if config.tune_seconds else None
        runner = Runner(self.model, config, pipeline, draft, searching)
        self.batch = Batch(runner, config, _step_times(runner, draft, config))
        logger.debug("start: rank %d has its cache", team.rank)
        if config.algorithm_cache is not None:
            run = partial(self.batch.runner.run_padding, config.chunk_tokens)
            warm_up(team, run=run, algorithm_cache=config.algorithm_cache)
        if config.warm_up:
            self.batch.runner.warm_up(warm_up_progress, late=config.warm_up_late)
        ready = time.perf_counter() - begin
        logger.info("engine ready in %.1f s, mode %s, up to %d requests at once", ready, config.mode, config.max_batch)
        self._entered = 0
        self._submitted: dict[int, Answer] = {}  # by the number of the request
        self._held: list[Piece] = []  # pieces of submitted requests that were not yet given out
        self.stats = Stats(load_seconds=ready)

    def _load(self, checkpoint: Checkpoint | None, progress: Progress | None) -> list[str]:
        """Fill the model with weights and adapters. Returns warnings of the weights."""
        warnings: list[str] = []
        if checkpoint is None:
            self.model.fill_dummy()
        else:
            warnings = self.model.load(checkpoint, progress, self.team)
        logger.debug("start: rank %d has its weights", self.team.rank)
        if self.config.lora is not None:
            self.model.load_adapters(self.config.lora)
        return warnings

    def generate(self, prompts: Prompt | Sequence[Prompt], **sampling: object) -> list[Completion]:
        """Generate n Completions for each prompt, in order. Collective. Arguments and errors as in `stream`.

        An answer is shorter than `max_tokens` where it would exceed `max_seq_len`: finish_reason "length". Where no token can
        be chosen, since its constraints exclude all or the model's logits are not finite, it ends with finish_reason "error";
        `error` says why, and the other answers go on.
        """
        prompts = as_prompts(prompts)
        return join_pieces(self.stream(prompts, **sampling), len(prompts))

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        seed: int | None = 0,
        ignore_eos: bool = False,
        **sampling: object,
    ) -> Generator[Piece, None, None]:
        """Yield a Piece for each new token, as soon as the host has it.

        prompts  text or lists of token ids
        seed     of prompt 0; the other prompts draw with seeds derived from it. None: random ones
        sampling  fields of SamplingParams by name; None: as in `defaults`, which are 64 tokens and greedy unless the checkpoint
                 sets them. TypeError for another name

        Collective: all ranks must draw the same pieces and close the stream after the same one. Closing removes unfinished
        prompts from the batch. Raised here, not at the first piece: ValueError for invalid arguments, for a prompt that is
        empty or leaves no room in `max_seq_len`, and where ranks pass different arguments.
        """
        params = replace(self.defaults.with_options(sampling), seed=seed, ignore_eos=ignore_eos)
        prompts = as_prompts(prompts)
        return self.answer(prompts, one_each(params, len(prompts)))

    def answer(self, prompts: Sequence[Prompt], params: Sequence[SamplingParams]) -> Generator[Piece, None, None]:
        """Yield pieces as `stream` does, with parameters for each prompt: `params[i]` for `prompts[i]`."""
        return _one_by_one(self.answer_in_steps(prompts, params))

    def answer_in_steps(
        self, prompts: Sequence[Prompt], params: Sequence[SamplingParams], *, agreed: bool = False
    ) -> Generator[list[Piece], None, None]:
        """Yield, once per step, a list of the pieces that have arrived, which may be empty; else as `answer`.

        agreed  prompts and params come from one rank, so they are not compared
        """
        prompts, params = list(prompts), list(params)
        self.settle()  # the next step reads prompts, and would do so
        if not agreed and self.team.size > 1:
            self._check_same(prompts, params)
        if len(params) != len(prompts):
            raise ValueError(f"{len(params)} sampling parameters for {len(prompts)} prompts; pass one each")
        if not prompts:
            raise ValueError("prompts is empty; pass at least one")
        params = self._seeded(params)
        self.requests.try_grammars(params, self.settle)
        encoded = [self.requests.encode(f"prompts[{index}]", prompt) for index, prompt in enumerate(prompts)]
        answers: list[Answer] = []
        for prompt, (ids, asked) in enumerate(zip(encoded, params, strict=True)):
            for index, one in enumerate(asked.answers() if isinstance(asked, SamplingParams) else [asked]):
                answers.append(self.requests.answer_to(ids, one, prompt, index))
            self.batch.scheduler.check(f"prompts[{prompt}]", answers[-1])
        return self._answer(answers)

    def _check_same(self, prompts: list[Prompt], params: list[SamplingParams]) -> None:
        """ValueError unless all ranks were given the same. Collective."""
        # Requests themselves take longer to exchange: only where their digests differ.
        digests = self.team.exchange(hashlib.sha256(encode((prompts, params), "prompts and params")).digest())
        asked = self.team.exchange((prompts, params)) if len(set(digests)) > 1 else []
        for rank, other in enumerate(asked):
            if other != asked[0]:
                pairs = (pair for parts in zip(other, asked[0], strict=True) for pair in zip_longest(*parts))
                one, first = next(pair for pair in pairs if pair[0] != pair[1])
                raise ValueError(
                    f"rank {rank} asked for {difference(one, first)}, rank 0 for {difference(first, one)}; "
                    f"all ranks must pass the same"
                )

    def submit(self, prompt: Prompt, params: SamplingParams, number: int | None = None) -> int:
        """Add a request, which joins the batch when there is room. Returns its number: `prompt` of its pieces.

        number  chosen by the caller, unlike that of any submitted request that has not ended; None: by the engine

        Collective: all ranks submit the same requests between the same steps. ValueError as in `generate`, and for several
        answers: submit `params.answers()` one by one.
        """
        [params] = self._seeded([params])
        if isinstance(params, SamplingParams) and params.n > 1:
            raise ValueError(f"n={params.n}: a submitted request has one answer; submit params.answers() one by one")
        number = self._entered if number is None else number
        if number in self._submitted:
            raise ValueError(f"number={number} is that of a request that has not ended; pass another, or None")
        self.requests.try_grammars([params], self.settle)
        answer = self.requests.answer_to(self.requests.encode("prompt", prompt), params, number, 0)
        self.batch.scheduler.check("prompt", answer)
        answer.pieces, self._submitted[number] = self._held, answer
        self._enter(answer)
        return number

    def prepare(self, params: SamplingParams) -> Future[Any] | None:
        """Have a request's grammar compiled in a thread; until the future is done, `submit` would wait for it.

        The caller has tried it (weft.text.grammars). Collective, as `submit`. None: the request has none, or `submit`
        will refuse it.
        """
        return self.requests.prepare(params)

    def cancel(self, number: int) -> None:
        """Remove a submitted request from the batch; it gives no more pieces.

        One that has ended stays as it is. Collective: all ranks cancel the same requests between the same steps.
        """
        self._held[:] = [piece for piece in self._held if piece.prompt != number]
        if (answer := self._submitted.get(number)) is not None:
            self._leave(answer)

    @property
    def load(self) -> Load:
        scheduler = self.batch.scheduler
        used = 1 - scheduler.pool.free / scheduler.pool.capacity
        return Load(
            running=len(scheduler.active),
            waiting=len(scheduler.waiting),
            cache_usage=used,
            preemptions=scheduler.preemptions,
            speculation=self.batch.speculation,
            snapshots=None if scheduler.snapshots is None else scheduler.snapshots.counts,
        )

    @property
    def has_work(self) -> bool:
        """True while some request has not ended, or some piece of a submitted one was not given out."""
        return self.batch.has_work or bool(self._held)

    @property
    def captures_left(self) -> int:
        """Number of CUDA graphs that the configuration's warm_up_late leaves to `capture_next`."""
        return self.batch.runner.captures_left

    def capture_next(self) -> None:
        """Capture a CUDA graph between two steps. Collective."""
        self.settle()
        self.batch.runner.capture_next()

    def step(self) -> list[Piece]:
        """Launch a chunk of the waiting prompts and a decode step; call it while `has_work`. Collective.

        Returns the pieces of submitted requests that have arrived: on GPUs from the step before.
        """
        self._step()
        return _drained(self._held)

    def settle(self) -> None:
        """End a decode step in flight over stages (docs/pipeline.md); the GPUs finish what was launched.

        Collective. Call it before other work of the team, if requests have not ended; the last `step` while `has_work` does so
        too.
        """
        self.batch.settle()

    def against_plan(self) -> list[str]:
        """On rank 0, lines with decode steps beside the plan's; none without a plan or on virtual ranks."""
        silent = self.measured is None or self.team.is_simulated or self.team.rank != 0
        return [] if silent else self.measured.lines()

    def _step(self) -> None:
        scheduler = self.batch.scheduler
        reads = scheduler.has_prompts
        try:
            for answers, tokens, rows in self.batch.advance():
                for answer, token, row in zip(answers, tokens, rows or repeat(None), strict=False):
                    if not answer.done and answer.take(token, row):
                        self._leave(answer)
        except BaseException:
            self.batch.restart()
            raise
        if self.measured is not None:
            active = len(scheduler.active)
            batch = self.batch.runner.buckets.of(active) if active else 0
            self.measured.note(batch, time.perf_counter(), reads=reads)

    def _answer(self, answers: list[Answer]) -> Generator[list[Piece], None, None]:
        """Submit requests and step until all have ended. They leave when the caller stops drawing, too."""
        runner, scheduler = self.batch.runner, self.batch.scheduler
        begin, captured, preempted = time.perf_counter(), runner.graphs.capture_seconds, scheduler.preemptions
        drafted = self.batch.speculation
        held: list[Piece] = []
        for answer in answers:
            answer.pieces, answer.together = held, True
            self._enter(answer)
        first_at, first_tokens, new_tokens = 0.0, 0, 0
        try:
            # Pieces may have arrived by another stream's step.
            while held or not all(answer.done for answer in answers):
                if not held:
                    self._step()
                pieces = _drained(held)
                arrived = sum(piece.token_id is not None for piece in pieces)
                new_tokens += arrived
                if pieces and not first_at:
                    first_at, first_tokens = time.perf_counter(), arrived
                yield pieces
        finally:
            for answer in answers:
                if not answer.done:
                    self._leave(answer)
            self.settle()
        self.team.synchronize()
        seconds = time.perf_counter() - first_at
        later = new_tokens - first_tokens  # the first two of a prompt may arrive together
        self.stats = Stats(
            load_seconds=self.stats.load_seconds,
            capture_seconds=runner.graphs.capture_seconds - captured,
            time_to_first_token=first_at - begin,
            tokens_per_second=later / seconds if later else 0.0,
            prompt_tokens=sum(len(answer.prompt) for answer in answers),
            new_tokens=new_tokens,
            preemptions=scheduler.preemptions - preempted,
            hit_tokens=_hit_tokens(answers),
            speculation=None if drafted is None else self.batch.speculation.since(drafted),
        )

    def _seeded(self, params: Sequence[SamplingParams]) -> list[SamplingParams]:
        """The parameters; where a seed is missing, rank 0 draws it."""
        if not any(isinstance(one, SamplingParams) and one.seed is None for one in params):
            return list(params)
        self.settle()
        seeds = self.team.exchange([secrets.randbits(63) for _ in params])[0]
        return [replace(one, seed=seed) if one.seed is None else one for one, seed in zip(params, seeds, strict=True)]

    def _enter(self, answer: Answer) -> None:
        answer.number, self._entered = self._entered, self._entered + 1
        self.batch.scheduler.submit(answer)

    def _leave(self, answer: Answer) -> None:
        self.batch.scheduler.finish(answer)
        if self._submitted.get(answer.prompt_index) is answer:
            del self._submitted[answer.prompt_index]


def _open(model: str | PathLike[str] | None, team: Team) -> Checkpoint:
    """Checkpoint of a model. Collective: the hub's cache must have the same revision on all ranks."""
    checkpoint = Checkpoint(BUILTIN if model is None else find_checkpoint(model))
    revisions = team.exchange(revision_of(checkpoint.directory))
    for rank, revision in enumerate(revisions):
        if revision != revisions[0]:
            raise CheckpointError(
                f"model={quoted(model)}: rank {rank} found revision {revision}, rank 0 {revisions[0]}; name it, as in "
                f"OWNER/NAME@REVISION"
            )
    return checkpoint


def _search(runner: Runner, config: EngineConfig) -> None:
    # weft.tune measures with weft.bench, both of which lie above the engine: loaded where a search is asked for.
    from weft.tune.engine_search import search

    search(runner, config)


def _step_times(runner: Runner, draft: Draft | None, config: EngineConfig) -> StepTimes | None:
    """Times of decode steps by which draft lengths are chosen; None where there is nothing to choose."""
    if config.speculative is None or not config.speculative.adaptive:
        return None
    return step_times(runner.pipeline.model, draft, config.speculative, runner.buckets.sizes)


def check_model(model: object) -> None:
    """ValueError unless `model` names or describes a model."""
    rule = "a checkpoint directory, a configuration of weft.models, or None for the built-in model"
    check_optional(check_instance, "model", model, (str, PathLike, DecoderConfig), rule)


def _longest(max_seq_len: int | None, limit: int) -> int:
    """Tokens of the longest sequence: max_seq_len, or the model's limit."""
    if max_seq_len is not None and not 2 <= max_seq_len <= limit:
        raise ValueError(f"max_seq_len={quoted(max_seq_len)} is not in 2 .. max_position_embeddings={limit}")
    if (longest := max_seq_len or limit) > MAX_POSITIONS:
        raise ValueError(
            f"max_seq_len={longest} is more than {MAX_POSITIONS}, up to which fp32 counts positions exactly; pass a smaller one"
        )
    return longest


def _measured(plan: ServingPlan | None, sizes: DecoderConfig, team: Team) -> Measured | None:
    """Times beside a plan's. ValueError for another model, GPU or number of ranks than the plan's."""
    if plan is None:
        return None
    plan.check_model(sizes)
    plan.check_gpu(team.caps.device_name)
    plan.check_world_size(team.size)
    return Measured(plan)


def _pipeline(config: EngineConfig, sizes: DecoderConfig, team: Team) -> Pipeline:
    if config.pipeline_parallel > 1 and sizes.linear_attention is not None:
        raise ValueError(
            f"pipeline_parallel={config.pipeline_parallel}: models with gated delta nets run in one stage; leave it out"
        )
    return Pipeline.of(team, config.pipeline_parallel, sizes.num_hidden_layers, config.microbatch_tokens)


def _tokenizer(checkpoint: Checkpoint, vocab_size: int) -> Tokenizer | None:
    """Tokenizer of a checkpoint; None: it has none. CheckpointError for more tokens than the model's."""
    if not has_tokenizer(checkpoint.directory):
        return None
    tokenizer = load_tokenizer(checkpoint.directory)
    if (size := tokenizer.get_vocab_size()) > vocab_size:
        raise CheckpointError(
            f"{checkpoint.directory}: tokenizer.json has {size} tokens, but config.json says vocab_size={vocab_size}"
        )
    return tokenizer


def _hit_tokens(answers: Sequence[Answer]) -> int:
    return sum(answer.hit_tokens or 0 for answer in answers)


def _drained(pieces: list[Piece]) -> list[Piece]:
    """The pieces, which leave the list."""
    drained = pieces.copy()
    pieces.clear()
    return drained


def _one_by_one(steps: Generator[list[Piece], None, None]) -> Generator[Piece, None, None]:
    with closing(steps):
        for pieces in steps:
            yield from pieces
