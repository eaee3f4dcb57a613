"""Command `weft generate`: flags to frozen dataclasses, work of a rank, output of its answers."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console
from rich.live import Live
from rich.text import Text

from weft.arguments import positive, quoted
from weft.cli.engine_flags import ENGINES_LOAD, EngineFlags, starting
from weft.console import check_torchrun, from_flags, notices, one_line_errors, option, single_valued, write_any_text
from weft.errors import WeftError
from weft.runtime.early import early_processes
from weft.runtime.environment import coordinates
from weft.runtime.launch import early_ranks, is_simulated, launch_early

if TYPE_CHECKING:
    from weft.engine import Completion, Engine, EngineConfig, Fault, Piece
    from weft.models import DecoderConfig
    from weft.runtime.team.team import Team


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateFlags(EngineFlags):
    """Flags of `weft generate`."""

    prompt: list[str] | None = option(None, "Prompt; may be repeated [default: 123+456=]")
    prompts_file: Path | None = option(
        None, "File of a prompt a line, up to 256 MiB, in place of --prompt; -: standard input"
    )
    prompt_token_ids: list[str] | None = option(
        None, "A prompt as token ids, as in 1,2,3, answered in token ids; needs no tokenizer; may be repeated"
    )
    chat: bool = option(False, "Each prompt is a user's message, put into the checkpoint's chat template")
    max_tokens: int | None = option(
        None, "Most tokens of an answer [default: the checkpoint's, else 64]", "--max-tokens", "--max-new-tokens"
    )
    temperature: float | None = option(
        None, "Randomness of the draw; 0: always the likeliest token [default: the checkpoint's, else 0]"
    )
    top_p: float | None = option(
        None, "Draw from the likeliest tokens of this probability together [default: the checkpoint's, else 1]"
    )
    top_k: int | None = option(
        None, "Draw from this number of likeliest tokens; 0: all [default: the checkpoint's, else 0]"
    )
    min_p: float | None = option(
        None, "Draw from tokens of at least this share of the greatest probability [default: the checkpoint's, else 0]"
    )
    n: int = option(1, "Answers to each prompt, all alike without --temperature")
    presence_penalty: float | None = option(
        None, "Subtracted from logits of tokens that are in the answer, -2 .. 2 [default: 0]"
    )
    frequency_penalty: float | None = option(
        None, "The same for each time that the token is there, -2 .. 2 [default: 0]"
    )
    repetition_penalty: float | None = option(
        None, "Divides positive logits of tokens in prompt or answer [default: the checkpoint's, else 1]"
    )
    min_tokens: int | None = option(
        None, "Fewest tokens of an answer before its end [default: the checkpoint's, else 0]"
    )
    bad_words: list[str] | None = option(None, "Text that an answer must not contain; may be repeated")
    json_schema: str | None = option(
        None, "JSON schema, as text, that an answer follows; this and the next three need weft[guided]"
    )
    regex: str | None = option(None, "Regular expression that an answer matches")
    choice: list[str] | None = option(None, "Text that an answer may be; may be repeated")
    grammar: str | None = option(None, "Grammar of an answer, in Lark's syntax or GBNF")
    seed: int = option(0, "Seed of the draws")
    stop: list[str] | None = option(None, "End an answer before this text; may be repeated")
    ignore_eos: bool = option(False, "Go on after an end-of-sequence token")
    prompt_tokens: int | None = option(None, "With --dummy-weights: length of a prompt of random tokens [default: 128]")
    as_json: bool = option(
        False, "Print an answer a line as JSON: prompt, index, text, token_ids, finish_reason", "--json"
    )
    traceback: bool = option(False, "Show where an error came from")


# Most bytes of --prompts-file: a device such as /dev/zero has no end.
MOST_PROMPT_BYTES = 256 << 20
# Flags that are sampling parameters by the same names.
SAMPLING = (
    "max_tokens", "temperature", "top_p", "top_k", "min_p", "n", "presence_penalty", "frequency_penalty",
    "repetition_penalty", "min_tokens", "bad_words", "seed", "stop", "ignore_eos",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateOptions:
    """Work of every rank.

    model     checkpoint directory; a configuration: random weights; None: the built-in model
    inputs    prompts as text or token ids
    shown     text to print before each answer; None: token ids are printed
    sampling  arguments of Engine.stream by name
    as_json   answers are printed as JSON, a line each
    """

    model: Path | DecoderConfig | None
    engine: EngineConfig
    inputs: list[str] | list[list[int]]
    shown: list[str] | None
    sampling: dict[str, Any]
    as_json: bool = False

    @classmethod
    def of(cls, flags: GenerateFlags) -> GenerateOptions:
        """Options by flags. ValueError for a value that no model can take."""
        from weft.engine import StructuredOutputsParams

        model = _model(flags)
        inputs, shown = _inputs(flags, model)
        engine = flags.engine_config()
        sampling = {name: getattr(flags, name) for name in SAMPLING}
        structure = {name: getattr(flags, name) for name in ("regex", "choice", "grammar")} | {
            "json": flags.json_schema
        }
        if any(value is not None for value in structure.values()):
            try:
                sampling["structured_outputs"] = StructuredOutputsParams(**structure)
            except ValueError as error:
                raise ValueError(str(error).replace("json=", "--json-schema ", 1)) from None
        return cls(model=model, engine=engine, inputs=inputs, shown=shown, sampling=sampling, as_json=flags.as_json)


def generate(flags: GenerateFlags) -> None:
    """Continue prompts with a model that is spread over several ranks."""
    with one_line_errors(flags.traceback):
        flags.check_names()
        check_torchrun(flags.device)
        count = 0 if coordinates() is not None else early_ranks(flags.world_size, flags.device)
        with early_processes(count, ENGINES_LOAD) as early:
            options = GenerateOptions.of(flags)
            if is_simulated(flags.world_size, flags.device):
                if flags.model is not None:
                    _check_simulable(flags, options)
                flags.say_simulated()
            world_size, plan = flags.world_size, options.engine.plan
            if plan is not None:
                world_size = plan.check_world_size(world_size)
            given = {"args": (options,), "heap_bytes": flags.heap_bytes}
            launch_early(generate_on_rank, world_size, flags.device, early, **given)


command = single_valued(from_flags(GenerateFlags, generate))


def _model(flags: GenerateFlags) -> Path | DecoderConfig | None:
    from weft.models import DecoderConfig
    from weft.models.hub import find_checkpoint

    if not flags.dummy_weights:
        return None if flags.model is None else find_checkpoint(flags.model)
    if flags.prompt or flags.prompts_file or flags.chat or flags.model is None:
        raise ValueError(
            "--dummy-weights takes --model NAME, such as qwen3-32b, and --prompt-tokens instead of --prompt and --chat"
        )
    return DecoderConfig.named(flags.model)


def _inputs(
    flags: GenerateFlags, model: Path | DecoderConfig | None
) -> tuple[list[str] | list[list[int]], list[str] | None]:
    """Prompts, and the text to print before each answer; None: token ids are printed."""
    from weft.models import Checkpoint, DecoderConfig
    from weft.text.tokenizer import has_tokenizer

    text = flags.stop or not flags.prompt_token_ids
    if text and isinstance(model, Path) and not has_tokenizer(model):
        Checkpoint(model)  # refuses a directory that is no checkpoint either
        raise ValueError(
            f"{model}: no tokenizer.json in it, so it has no text; pass --prompt-token-ids 1,2,3 without --stop, or save the "
            f"model's fast tokenizer there"
        )
    if flags.prompt_token_ids:
        if any((flags.prompt, flags.prompts_file, flags.chat, flags.prompt_tokens is not None)):
            raise ValueError(
                "--prompt-token-ids takes the place of --prompt, --chat and --prompt-tokens; leave them out"
            )
        return [_token_ids(text) for text in flags.prompt_token_ids], None
    if isinstance(model, DecoderConfig):
        count = positive("--prompt-tokens", 128 if flags.prompt_tokens is None else flags.prompt_tokens)
        return [random.Random(flags.seed).choices(range(model.vocab_size), k=count)], None
    if flags.prompt_tokens is not None:
        raise ValueError(
            f"--prompt-tokens {flags.prompt_tokens} goes with --dummy-weights; a checkpoint reads --prompt"
        )
    prompts = _prompts(flags)
    if flags.chat:
        return _as_chat(prompts, model), [f"{prompt}\n" for prompt in prompts]
    return prompts, prompts


def _prompts(flags: GenerateFlags) -> list[str]:
    """Prompts as text, of --prompt or of the lines of --prompts-file."""
    file = flags.prompts_file
    if file is None:
        return flags.prompt or ["123+456="]
    if flags.prompt:
        raise ValueError(f"--prompts-file {file} takes the place of --prompt; leave one of them out")
    if str(file) == "-":
        if coordinates() is not None:
            raise ValueError("--prompts-file - reads standard input, which torchrun gives to no rank; pass a file")
        text = sys.stdin.read(MOST_PROMPT_BYTES + 1)
        long = len(text) > MOST_PROMPT_BYTES
    else:
        try:
            with file.open("rb") as opened:
                content = opened.read(MOST_PROMPT_BYTES + 1)
            long = len(content) > MOST_PROMPT_BYTES
            text = "" if long else content.decode("utf-8")
        except (OSError, UnicodeError) as error:
            raise ValueError(f"--prompts-file {file} cannot be read: {error}; pass a file of text in UTF-8") from None
    if long:
        raise ValueError(f"--prompts-file {file} holds more than {MOST_PROMPT_BYTES:,} bytes; split it")
    if not (lines := [line for line in text.splitlines() if line]):
        raise ValueError(f"--prompts-file {file} holds no prompt; write one on each line")
    return lines


def _token_ids(text: str) -> list[int]:
    words = text.split(",")
    if not all(word.isascii() and word.isdigit() and len(word) < 19 for word in words):
        raise ValueError(f"--prompt-token-ids {quoted(text)} is not a list of token ids, as in 1,2,3")
    return list(map(int, words))


def _check_simulable(flags: GenerateFlags, options: GenerateOptions) -> None:
    import torch

    from weft.models import Checkpoint, DecoderConfig
    from weft.models.config import check_simulable

    config = options.model if flags.dummy_weights else DecoderConfig.from_dict(Checkpoint(options.model).config)
    names = "--model and --dummy-weights" if flags.dummy_weights else "--model"
    remedy = f"run it on a machine with GPUs, or run the built-in model, without {names}"
    if flags.device == "auto" and (gpus := torch.cuda.device_count()):
        remedy = f"--world-size {flags.world_size} needs {flags.world_size} GPUs and this machine has {gpus}"
    check_simulable(
        f"--model {flags.model}",
        config,
        remedy,
        mode=options.engine.mode,
        reference="--mode reference",
    )


def _as_chat(prompts: list[str], model: Path | None) -> list[list[int]]:
    from weft.models import Checkpoint
    from weft.models.builtin import PATH
    from weft.text.chat import ChatTemplate, prompt_of
    from weft.text.tokenizer import load_tokenizer

    directory = Checkpoint(model or PATH).directory
    template, tokenizer = ChatTemplate(directory), load_tokenizer(directory)
    return [prompt_of(template, tokenizer, [{"role": "user", "content": prompt}]) for prompt in prompts]


def generate_on_rank(team: Team, options: GenerateOptions) -> None:
    """Generate on one rank of `team`. Rank 0 prints.

    Only rank 0 raises an answer's error, after it has printed: another rank's would end it before.
    """
    from weft.engine import Engine

    talks = team.rank == 0
    write_any_text()  # on GPUs each rank is a process
    with starting(talks) as progress:
        engine = Engine(options.model, team, config=options.engine, **progress)
    if options.as_json:
        completions = engine.generate(options.inputs, **options.sampling)
        if talks:
            _print_json(options, completions)
            _print_speed(engine, team)
            _say_greedy(engine, options)
            _check([made.error for made in completions])
        return
    faults: list[Fault | None] = []
    pieces = _with_faults(engine.stream(options.inputs, **options.sampling), faults)
    if not talks:
        for _ in pieces:
            pass
        return
    n = options.sampling["n"]
    if options.shown is None:
        answers = [[] for _ in range(n * len(options.inputs))]
        for piece in pieces:
            if piece.token_id is not None:
                answers[piece.prompt * n + piece.index].append(str(piece.token_id))
        for answer in answers:
            typer.echo(" ".join(answer))
    else:
        _print_answers([text for text in options.shown for _ in range(n)], n, pieces)
    _print_speed(engine, team)
    _say_greedy(engine, options)
    _check(faults)


def _say_greedy(engine: Engine, options: GenerateOptions) -> None:
    """Name the flags of a draw that there is not: at temperature 0 each token is the likeliest."""
    given = options.sampling["temperature"]
    if not (engine.defaults.temperature if given is None else given):
        for name in ("top_p", "top_k", "min_p"):
            if options.sampling[name] is not None:
                notices.info(
                    "weft: --%s has no effect at temperature 0; pass --temperature above 0", name.replace("_", "-")
                )


def _with_faults(pieces: Iterator[Piece], faults: list[Fault | None]) -> Iterator[Piece]:
    """Yield the pieces, and add the errors among them to ``faults``."""
    for piece in pieces:
        faults.append(piece.error)
        yield piece


def _check(faults: Sequence[Fault | None]) -> None:
    """WeftError if an answer ended by an error."""
    messages = [fault.message for fault in faults if fault is not None]
    if messages:
        more = f" (and {len(messages) - 1} more answers by errors)" if len(messages) > 1 else ""
        raise WeftError(f"an answer has ended by an error: {messages[0]}{more}")


def _print_json(options: GenerateOptions, completions: list[Completion]) -> None:
    """Print an object a line for each answer, in the order of the prompts."""
    for number, made in enumerate(completions):
        line = {"prompt": options.inputs[number // options.sampling["n"]], "index": made.index, "text": made.text}
        line |= {"token_ids": made.token_ids, "finish_reason": made.finish_reason}
        if made.error is not None:
            line["error"] = made.error.message
        typer.echo(json.dumps(line, ensure_ascii=False))


def _print_answers(prompts: list[str], n: int, pieces: Iterator[Piece]) -> None:
    """Print answers: one as it grows; several a line each, growing on a terminal, else at the end.

    prompts  n times each
    """
    if len(prompts) == 1:
        typer.echo(prompts[0], nl=False)
        for piece in pieces:
            typer.echo(piece.text, nl=False)
        typer.echo()
        return
    console = Console(soft_wrap=True)
    answers = list(prompts)
    with Live(console=console, transient=True, auto_refresh=False) if console.is_terminal else nullcontext() as live:
        for piece in pieces:
            answers[piece.prompt * n + piece.index] += piece.text
            if live is not None:
                live.update(Text("\n".join(answers)), refresh=True)
    for answer in answers:
        typer.echo(answer)


def _print_speed(engine: Engine, team: Team) -> None:
    stats, runner = engine.stats, engine.batch.runner
    ranks = f"{team.size} rank{'s' if team.size > 1 else ''}"
    where = f"{ranks}, simulated" if team.is_simulated else f"{ranks} on {team.caps.device_name}"
    note = " (the simulator's times mean nothing)" if team.is_simulated else ""
    chunks = f", up to {runner.prompts.longest} at once" if runner.prompts.longest < stats.prompt_tokens else ""
    decode = f"decode: {engine.model.plan(runner.buckets.largest)}" if runner.buckets.largest else "no decode steps"
    if (counts := stats.speculation) is not None:
        decode += (
            f"\nspeculation: {counts.accepted_tokens} of {counts.draft_tokens} drafted tokens accepted, "
            f"{counts.tokens_per_draft:.2f} tokens a step with drafts"
        )
    later = f"{stats.tokens_per_second:.1f} tokens/s after it" if stats.tokens_per_second else "none came after it"
    notices.info(
        f"first token after {stats.time_to_first_token:.3f} s, {later}{note}\n"
        f"mode {engine.config.mode}, {where}; loaded in {stats.load_seconds:.1f} s\n"
        f"prompts of {stats.prompt_tokens} tokens{chunks}: {engine.model.plan(runner.prompts.longest)}\n{decode}\n"
        f"KV cache {engine.cache_plan}",
    )
    for line in engine.against_plan():
        notices.info(line)
