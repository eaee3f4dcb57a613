"""Inference over several GPUs from one ordinary Python process, which starts and ends the ranks."""

from __future__ import annotations

import os
import queue
from collections.abc import Callable, Generator, Mapping, Sequence
from functools import partial
from itertools import count
from os import PathLike
from typing import Any

from tokenizers import Tokenizer

from weft.arguments import check_heap_bytes, quoted
from weft.engine.answers import Completion, Piece, Stats, join_pieces
from weft.engine.config import EngineConfig, watchers_of
from weft.engine.engine import Engine
from weft.engine.loop import Command, Processes, check_process, llm_closed
from weft.engine.params import Prompt, SamplingParams, as_prompts, one_each
from weft.engine.ranks import Placement, VirtualRanks
from weft.models import DecoderConfig
from weft.models.checkpoint import Progress
from weft.runtime.launch import launch
from weft.runtime.team.team import Team, init
from weft.text.chat import ChatTemplate, Message, prompt_of
from weft.text.tokenizer import load_tokenizer

Requests = tuple[list[Prompt], list[SamplingParams]]
Pieces = Generator[Piece, None, None]
# Arguments of calls: one for all prompts, or one for each.
Prompts = Prompt | Sequence[Prompt]
Params = SamplingParams | Sequence[SamplingParams] | None
Messages = Sequence[Message] | Sequence[Sequence[Message]]
# Takes the statistics of an answer that has been drawn to its end.
Keep = Callable[[Stats], None]


class Calls:
    """Calls of a request loop's clients, which draw their pieces from any thread.

    A garbage collector may drop pieces at any line of the program: so there are no locks, only queues and single operations of
    a dictionary.

    put  sends a command to the ranks
    """

    def __init__(self, put: Callable[[Command], None]) -> None:
        self._put, self._numbers, self._owner = put, count(), os.getpid()
        self._messages: dict[int, queue.SimpleQueue[tuple[str, Any]]] = {}  # by call
        self._computed: int | None = None  # the call whose pieces come
        self._failure: BaseException | None = None  # for every further call

    def ask(self, requests: Requests, keep: Keep) -> Pieces:
        """Pieces of the answers to a call, which are computed whether they are drawn or not.

        Closing or dropping them cancels the call. A refusal is raised at once.
        """
        number, messages = next(self._numbers), queue.SimpleQueue()
        self._messages[number] = messages

        def leave() -> None:
            if self._messages.pop(number, None) is not None and os.getpid() == self._owner:
                self._put(("cancel", number))

        def pieces() -> Generator[Piece | None, None, None]:
            try:
                kind, value = messages.get()
                if kind != "error":
                    yield None  # drawn below: a generator that has not begun would not notice that it is closed
                while kind != "ended":
                    if kind == "error":
                        raise value
                    yield from value
                    check_process(self._owner)
                    kind, value = messages.get()
                keep(value)
            finally:
                leave()

        try:
            self._put(("call", number, *requests))
            if self._failure is not None:  # otherwise `take` will see this call
                raise self._failure
            begun = pieces()
            next(begun)
            return begun
        except BaseException:
            leave()
            raise

    def take(self, kind: str, value: Any) -> None:
        """Take what rank 0 tells, on the thread of the ranks."""
        if kind == "accepted":
            self._computed, value = value[-1], []
        elif kind == "rejected":
            self._computed, why = value
            kind, value = "error", ValueError(why)
        elif kind == "error":
            self._failure = value
            for number in list(self._messages):
                self._tell(number, kind, value)
        if kind != "load":
            self._tell(self._computed, kind, value)

    def _tell(self, number: int | None, kind: str, value: object) -> None:
        """Hand a message to the caller, unless that has left."""
        end = kind in ("ended", "error")
        if (messages := self._messages.pop(number, None) if end else self._messages.get(number)) is not None:
            messages.put((kind, value))


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
    heap_bytes  symmetric memory per rank; None: 2 GiB on GPUs, 512 MiB on virtual ranks. HeapExhausted says what is needed
                where `chunk_tokens` of a wide model need more
    progress    called with (bytes read, bytes to read) while rank 0's weights load
    warm_up_progress  called with (graphs captured, graphs to capture) during `warm_up`; None: the logger "weft.engine" gets a
                line, level INFO, for each tenth of the graphs
    config      an EngineConfig; the default one if None
    options     fields of EngineConfig by name, which replace `config`'s

    `defaults` are the SamplingParams of a call that is given none: from the checkpoint's generation_config.json, else
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
        **options: object,
    ) -> None:
        watchers = watchers_of(progress, warm_up_progress)
        config, heap_bytes = EngineConfig.of(config, options), check_heap_bytes(heap_bytes)
        placed = Placement.of(model, world_size, device, config)
        self.world_size, self.device, self.directory = placed.world_size, placed.device, placed.directory
        self.defaults = placed.defaults
        self.stats: Stats | None = None
        self._chat: tuple[ChatTemplate, Tokenizer] | None = None  # reading a large vocabulary takes half a second
        self._engine: Engine | None = None  # under torchrun, of this rank
        self._ranks: Processes | VirtualRanks | None = None
        self._closed = False
        make = partial(Engine, placed.source, config=config)
        if placed.torchrun:
            team = init(heap_bytes=heap_bytes)
            self._engine = make(team, **(watchers if team.rank == 0 else {}))
        elif self.device == "cuda":
            self._calls = Calls(lambda command: self._ranks.put(command))
            self._ranks = Processes(self.world_size, make, heap_bytes, watchers, self._calls.take)
        else:
            # An engine's tensors belong to one simulation, so every call loads the model again.
            given = self.world_size, partial(make, warn=False), heap_bytes, watchers
            self._virtual = partial(VirtualRanks, *given, one_call=True)
            VirtualRanks.check_free()
            with VirtualRanks.turn:  # errors and warnings come now
                launch(partial(_build, make), self.world_size, "sim", heap_bytes=heap_bytes)

    def generate(self, prompts: Prompts, params: Params = None) -> list[Completion]:
        """Generate a completion for each prompt, in order, or n completions if `params` say so.

        prompts  text or lists of token ids
        params   one for all prompts, or a list with one for each prompt; None: `defaults`

        With one `params`, the first prompt draws with its seed, and each other prompt with one derived from it; pass a list to
        choose every seed. ValueError for a prompt that cannot be answered.
        """
        prompts = as_prompts(prompts)
        return join_pieces(self._ask(prompts, params), len(prompts))

    def stream(self, prompts: Prompts, params: Params = None) -> Pieces:
        """Yield pieces as tokens arrive; arguments as in `generate`.

        Closing or dropping the generator stops the answer with the step that runs, and `stats` stay as they were.
        Leaving a `for` loop does not close a generator that still has a name: use `contextlib.closing`, or the next call first
        computes its rest (under torchrun, beside the new answer). The ranks do not wait for a slow caller: pieces are kept till
        they are drawn (under torchrun, a step runs when its pieces are drawn).
        """
        return self._ask(as_prompts(prompts), params)

    def chat(
        self, messages: Messages, params: Params = None, *, variables: Mapping[str, Any] | None = None
    ) -> list[Completion]:
        """Generate the assistant's answers to one conversation or several, by the checkpoint's chat template.

        messages   [{"role": "user", "content": "..."}, ...]
        variables  further variables of the template, such as {"enable_thinking": False}
        """
        return self.generate(self._rendered(messages, variables), params)

    def stream_chat(
        self, messages: Messages, params: Params = None, *, variables: Mapping[str, Any] | None = None
    ) -> Pieces:
        """Yield the pieces of these answers as tokens arrive, as `stream` does; arguments as in `chat`."""
        return self.stream(self._rendered(messages, variables), params)

    def _ask(self, prompts: list[Prompt], params: Params) -> Pieces:
        if self._closed:
            raise llm_closed()
        if params is None or isinstance(params, SamplingParams):
            params = one_each(params or self.defaults, len(prompts))
        elif not isinstance(params, Sequence):
            raise ValueError(f"params={quoted(params)} is not a SamplingParams or a list of SamplingParams")
        requests = prompts, list(params)
        if self._engine is not None:
            return self._answer_on_rank(self._engine, self._engine.answer(*requests))
        if self.device == "cuda":
            return self._calls.ask(requests, self._keep)
        calls = Calls(lambda command: ranks.put(command))
        self._ranks = ranks = self._virtual(calls.take)
        return calls.ask(requests, self._keep)

    def _answer_on_rank(self, engine: Engine, pieces: Pieces) -> Pieces:
        """Yield the pieces on every rank of torchrun. No step runs before its pieces are drawn."""
        yield from pieces
        self._keep(engine.stats)

    def _rendered(self, messages: Messages, variables: Mapping[str, Any] | None) -> list[list[int]]:
        """Prompt of each conversation, as token ids."""
        if not messages:
            raise ValueError("messages is empty; pass at least one")
        if self.directory is None:
            raise ValueError("a model with random weights has no chat template; pass token ids to generate()")
        if isinstance(messages, str) or not isinstance(messages, Sequence):
            raise ValueError(f"messages={quoted(messages)} is not a list of messages, or of lists of messages")
        conversations = [messages] if isinstance(messages[0], Mapping) else messages
        if self._chat is None:
            self._chat = ChatTemplate(self.directory), load_tokenizer(self.directory)
        template, tokenizer = self._chat
        return [prompt_of(template, tokenizer, conversation, variables) for conversation in conversations]

    def close(self) -> None:
        """End the ranks. A second call does nothing."""
        if self._ranks is not None:
            self._ranks.close()
        self._closed = True  # a close that was interrupted has closed nothing
        if self._engine is not None:
            team, self._engine = self._engine.team, None
            team.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _keep(self, stats: Stats) -> None:
        self.stats = stats


def _build(make: Callable[..., Engine], team: Team) -> None:
    make(team)
