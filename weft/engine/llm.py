"""Inference over several GPUs from one ordinary Python process, which starts and ends the ranks."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from functools import partial
from os import PathLike
from typing import Any

from tokenizers import Tokenizer

from weft.arguments import check_heap_bytes, quoted
from weft.engine.chat import ChatTemplate, Message, prompt_of
from weft.engine.config import EngineConfig
from weft.engine.engine import Engine, check_model
from weft.engine.outputs import Completion, Piece, Stats, join_pieces
from weft.engine.params import Prompt, SamplingParams, as_prompts, one_each, sampling_defaults
from weft.engine.placement import Placement
from weft.engine.processes import ProcessWorkers
from weft.engine.progress import watchers_of
from weft.engine.tokenizer import load_tokenizer
from weft.engine.workers import GENERATE, STREAM, Pace, RankWorkers, VirtualWorkers
from weft.errors import WeftError
from weft.models import DecoderConfig
from weft.models.checkpoint import Checkpoint, Progress


class LLM:
    """Inference over several GPUs, text in, text out, from a process that need not know of ranks.

        with weft.LLM("path/of/Qwen3-32B", world_size=4) as llm:
            [answer] = llm.generate("The weft is", weft.SamplingParams(temperature=0.7, max_tokens=100))

    model       checkpoint directory, or OWNER/NAME or OWNER/NAME@REVISION in the Hugging Face cache, where `hf download` puts
                it (weft downloads nothing); None: the built-in model, which adds; "adder-moe": the one with experts; a
                configuration of weft.models: random weights. Without tokenizer.json prompts are token ids, and answers have no
                text
    world_size  None: all GPUs, or 4 virtual ranks
    device      "cuda": a process per GPU, which stays until `close` or the end of this process; "sim": virtual ranks in this
                process, made anew for every call, for models of up to 0.2 billion parameters, 2 in mode "reference";
                "auto": GPUs if there are enough
    heap_bytes  symmetric memory per rank; None: 2 GiB on GPUs, 64 MiB on virtual ranks. HeapExhausted says how much is needed
                where `chunk_tokens` of a wide model need more
    progress    called with (bytes read, bytes to read) while rank 0's weights load
    warm_up_progress  called with (graphs captured, graphs to capture) during `warm_up`; None: the logger "weft.engine" gets a
                line, level INFO, for each tenth of them
    config      an EngineConfig; the default one if None
    options     fields of EngineConfig by name, in place of those of `config`

    `defaults` are the SamplingParams of a call that is given none: those of the checkpoint's generation_config.json, else
    SamplingParams(). Settings that weft does not follow, and NaN weights, are logged once, a line each (docs/logging.md).

    On GPUs a script must be importable: guard its top level with `if __name__ == "__main__"`, since processes are spawned. An
    error of a rank is raised here once, and ends all. Under torchrun, which has started the ranks already, every rank makes the
    LLM and the same calls, and gets the answers; all ranks draw the same pieces, and close a stream after the same one.
    ValueError (CheckpointError for the directory), NotEnoughGPUs.
    """

    def __init__(
        self,
        model: str | PathLike[str] | DecoderConfig | None = None,
        world_size: int | None = None,
        *,
        device: str = "auto",
        heap_bytes: int | None = None,
        progress: Progress | None = None,
        warm_up_progress: Progress | None = None,
        config: EngineConfig | None = None,
        **options: Any,
    ) -> None:
        check_model(model)
        watchers = watchers_of(progress, warm_up_progress)
        config, heap_bytes = EngineConfig.of(config, options), check_heap_bytes(heap_bytes)
        placed = Placement.of(model, world_size, device, config.mode)
        self.world_size, self.device, self.directory = placed.world_size, placed.device, placed.directory
        self.defaults = SamplingParams() if self.directory is None else sampling_defaults(Checkpoint(self.directory))
        self.stats: Stats | None = None
        self._chat: tuple[ChatTemplate, Tokenizer] | None = None  # reading a large vocabulary takes half a second
        self._workers: ProcessWorkers | VirtualWorkers | RankWorkers | None
        make = partial(Engine, placed.source, config=config)
        if placed.torchrun:
            self._workers = RankWorkers(make, heap_bytes, watchers)
        else:
            kind = ProcessWorkers if self.device == "cuda" else VirtualWorkers
            self._workers = kind(self.world_size, make, heap_bytes, watchers)

    def generate(
        self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[Completion]:
        """Generate a completion for each prompt, in order; n of them if `params` say so.

        prompts  text or lists of token ids
        params   one for all prompts, or a list of one each; None: `defaults`

        With one `params`, the first prompt draws with its seed, and each other prompt with one derived from it; pass a list to
        choose every seed. ValueError for a prompt that cannot be answered.
        """
        prompts = as_prompts(prompts)
        return join_pieces(self._ask(prompts, params, GENERATE), len(prompts))

    def stream(
        self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> Generator[Piece, None, None]:
        """Yield pieces as tokens arrive; arguments as in `generate`.

        Closing or dropping the generator stops the answer: on GPUs the ranks run at most 64 more steps, virtual ranks end the
        one that runs, and `stats` stay those of the answer before. Leaving a `for` loop does not close a generator that still
        has a name; the next call then first computes its rest (under torchrun, beside its own). Use `contextlib.closing`.
        On GPUs the ranks wait for a caller that falls 64 steps behind, and `stats` count that time.
        """
        return self._ask(as_prompts(prompts), params, STREAM)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        variables: Mapping[str, Any] | None = None,
    ) -> list[Completion]:
        """Generate the assistant's answers to one conversation or several, by the checkpoint's chat template.

        messages   [{"role": "user", "content": "..."}, ...]
        variables  further variables of the template, such as {"enable_thinking": False}
        """
        return self.generate(self._rendered(messages, variables), params)

    def stream_chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        variables: Mapping[str, Any] | None = None,
    ) -> Generator[Piece, None, None]:
        """Yield the pieces of these answers as tokens arrive, as `stream` does; arguments as in `chat`."""
        return self.stream(self._rendered(messages, variables), params)

    def _ask(
        self, prompts: list[Prompt], params: SamplingParams | Sequence[SamplingParams] | None, pace: Pace
    ) -> Generator[Piece, None, None]:
        if self._workers is None:
            raise WeftError("this LLM is closed; make a new one")
        if params is None or isinstance(params, SamplingParams):
            params = one_each(params or self.defaults, len(prompts))
        elif not isinstance(params, Sequence):
            raise ValueError(f"params={quoted(params)} is not a SamplingParams or a list of them")
        return self._workers.ask((prompts, list(params)), self._keep, pace)

    def _rendered(
        self, messages: Sequence[Message] | Sequence[Sequence[Message]], variables: Mapping[str, Any] | None
    ) -> list[list[int]]:
        """Prompt of each conversation, as token ids."""
        if not messages:
            raise ValueError("messages is empty; pass at least one")
        if self.directory is None:
            raise ValueError("a model with random weights has no chat template; pass token ids to generate()")
        if isinstance(messages, str) or not isinstance(messages, Sequence):
            raise ValueError(f"messages={quoted(messages)} is not a list of messages, or of lists of them")
        conversations = [messages] if isinstance(messages[0], Mapping) else messages
        if self._chat is None:
            self._chat = ChatTemplate(self.directory), load_tokenizer(self.directory)
        template, tokenizer = self._chat
        return [prompt_of(template, tokenizer, conversation, variables) for conversation in conversations]

    def close(self) -> None:
        """End the ranks. A second call does nothing."""
        if self._workers is not None:
            self._workers.close()
            self._workers = None

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _keep(self, stats: Stats) -> None:
        self.stats = stats
