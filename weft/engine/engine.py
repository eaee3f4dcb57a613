"""Text in, text out: a checkpoint directory, its tokenizer and a decoder over all ranks of a team."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from os import PathLike
from typing import TYPE_CHECKING, Literal, NamedTuple

import torch

from weft.engine.decoder import Decoder
from weft.engine.sampling import Sampling
from weft.engine.text import TextStream, load_tokenizer
from weft.errors import CheckpointError
from weft.layers import Mode
from weft.layers.parallel import check_mode
from weft.models.builtin import PATH as BUILTIN
from weft.models.checkpoint import Checkpoint, Progress
from weft.models.qwen3 import Qwen3ForCausalLM

if TYPE_CHECKING:
    from weft.runtime.team import Team

FinishReason = Literal["eos", "stop", "length"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """One prompt's answer.

    text:          without the end-of-sequence token, and cut before a stop string
    token_ids:     all that was generated, those included
    finish_reason: "eos", "stop" (a stop string) or "length" (`max_new_tokens`, or the model's limit)
    """

    text: str
    token_ids: list[int]
    finish_reason: FinishReason


class Piece(NamedTuple):
    """One generated token of one prompt. `text` may be empty while a character or a stop string is undecided."""

    prompt: int
    text: str
    token_id: int
    finish_reason: FinishReason | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Stats:
    """Seconds: load_seconds of the engine, the rest of its latest generation.

    capture_seconds:     making the decode step's CUDA graph, where this call had to
    time_to_first_token: from then to each prompt's first token on the host
    tokens_per_second:   all tokens after the first ones, over the time since; 0 where there were none
    """

    load_seconds: float
    capture_seconds: float = 0.0
    time_to_first_token: float = 0.0
    tokens_per_second: float = 0.0
    prompt_tokens: int = 0
    new_tokens: int = 0


class Engine:
    """A model on all ranks of `team`. Collective: all ranks pass the same arguments and get the same tokens.

    model_dir:   a Qwen3 checkpoint in Hugging Face format with tokenizer.json; None: the built-in one, which adds
    dtype:       None: the checkpoint's
    max_seq_len: prompt and answer together; None: the model's max_position_embeddings
    cuda_graph:  decode steps as CUDA graphs, where the team is on GPUs
    progress:    called with (bytes read, bytes to read) while this rank's weights load

    CheckpointError (a ValueError) where the directory cannot be loaded, ValueError where W cannot split the model.
    """

    def __init__(
        self,
        model_dir: str | PathLike[str] | None,
        team: Team,
        *,
        mode: Mode = "gemm_ar",
        dtype: torch.dtype | None = None,
        max_seq_len: int | None = None,
        cuda_graph: bool = True,
        progress: Progress | None = None,
    ) -> None:
        begin = time.perf_counter()
        check_mode(mode)
        checkpoint = Checkpoint(BUILTIN if model_dir is None else model_dir)
        self.team, self.mode = team, mode
        self.model = Qwen3ForCausalLM.from_pretrained(checkpoint, team, mode=mode, dtype=dtype, progress=progress)
        config = self.model.config
        self.tokenizer = load_tokenizer(checkpoint.directory)
        if self.tokenizer.get_vocab_size() > config.vocab_size:
            raise CheckpointError(
                f"{checkpoint.directory}: tokenizer.json has {self.tokenizer.get_vocab_size()} tokens, but config.json "
                f"says vocab_size={config.vocab_size}"
            )
        self.eos_token_ids = checkpoint.eos_token_ids()
        self.max_seq_len = config.max_position_embeddings if max_seq_len is None else max_seq_len
        if not 2 <= self.max_seq_len <= config.max_position_embeddings:
            raise ValueError(
                f"max_seq_len={max_seq_len} is not in 2 .. max_position_embeddings={config.max_position_embeddings}"
            )
        self.cuda_graph = cuda_graph and team.device.type == "cuda"
        self._decoder: Decoder | None = None
        self.stats = Stats(load_seconds=time.perf_counter() - begin)

    def generate(
        self,
        prompts: str | Sequence[str],
        *,
        max_new_tokens: int = 64,
        temperature: float = 0.0,
        top_p: float = 1.0,
        seed: int = 0,
        stop: str | Sequence[str] = (),
    ) -> list[Completion]:
        """One completion a prompt. ValueError for an empty prompt, and for one that leaves no room in `max_seq_len`.

        An answer is shorter than `max_new_tokens` where it would outgrow `max_seq_len`: finish_reason "length".
        """
        prompts = [prompts] if isinstance(prompts, str) else list(prompts)
        texts: list[list[str]] = [[] for _ in prompts]
        token_ids: list[list[int]] = [[] for _ in prompts]
        reasons: list[FinishReason] = ["length"] * len(prompts)
        for piece in self.stream(
            prompts, max_new_tokens=max_new_tokens, temperature=temperature, top_p=top_p, seed=seed, stop=stop
        ):
            texts[piece.prompt].append(piece.text)
            token_ids[piece.prompt].append(piece.token_id)
            reasons[piece.prompt] = piece.finish_reason or reasons[piece.prompt]
        return [
            Completion(text="".join(text), token_ids=ids, finish_reason=reason)
            for text, ids, reason in zip(texts, token_ids, reasons, strict=True)
        ]

    def stream(
        self,
        prompts: str | Sequence[str],
        *,
        max_new_tokens: int = 64,
        temperature: float = 0.0,
        top_p: float = 1.0,
        seed: int = 0,
        stop: str | Sequence[str] = (),
    ) -> Iterator[Piece]:
        """The same, a piece as soon as its token is there: for every step the prompts that go on, in order.

        Arguments are checked at once, not at the first piece. Every rank must draw the same pieces.
        """
        sampling = Sampling(max_new_tokens=max_new_tokens, temperature=temperature, top_p=top_p, seed=seed, stop=stop)
        prompts = [prompts] if isinstance(prompts, str) else list(prompts)
        asked = self.team.exchange((prompts, sampling))
        for rank, other in enumerate(asked):
            if other != asked[0]:
                raise ValueError(f"rank {rank} asked for {other}, rank 0 for {asked[0]}; all ranks must pass the same")
        return self._stream(self._encode(prompts), sampling)

    def _encode(self, prompts: list[str]) -> list[list[int]]:
        if not prompts:
            raise ValueError("prompts is empty; pass at least one")
        encoded = []
        for index, prompt in enumerate(prompts):
            if not isinstance(prompt, str):
                raise ValueError(f"prompts[{index}]={prompt!r} is not a string")
            ids = self.tokenizer.encode(prompt).ids
            if not ids:
                raise ValueError(f"prompts[{index}]={prompt!r} is empty; a prompt needs at least one token")
            if len(ids) >= self.max_seq_len:
                raise ValueError(
                    f"prompts[{index}] has {len(ids)} tokens and leaves no room for an answer in max_seq_len="
                    f"{self.max_seq_len}; shorten it to {self.max_seq_len - 1} tokens"
                )
            encoded.append(ids)
        return encoded

    def _stream(self, prompts: list[list[int]], sampling: Sampling) -> Iterator[Piece]:
        budgets = [min(sampling.max_new_tokens, self.max_seq_len - len(prompt)) for prompt in prompts]
        decoder, capture_seconds = self._prepare(prompts, max(budgets), sampling)
        texts = [TextStream(self.tokenizer, sampling.stop) for _ in prompts]
        alive = set(range(len(prompts)))
        first_at, new_tokens = 0.0, 0
        begin = time.perf_counter()
        for step, tokens in enumerate(self._tokens(decoder, prompts, sampling, max(budgets))):
            first_at = first_at or time.perf_counter()
            for index in sorted(alive):
                piece = self._piece(index, tokens[index], texts[index], last=step + 1 == budgets[index])
                new_tokens += 1
                if piece.finish_reason is not None:
                    alive.discard(index)
                yield piece
            if not alive:
                break
        self.team.synchronize()
        later, seconds = new_tokens - len(prompts), time.perf_counter() - first_at
        self.stats = Stats(
            load_seconds=self.stats.load_seconds,
            capture_seconds=capture_seconds,
            time_to_first_token=first_at - begin,
            tokens_per_second=later / seconds if later else 0.0,
            prompt_tokens=sum(map(len, prompts)),
            new_tokens=new_tokens,
        )

    def _piece(self, prompt: int, token_id: int, text: TextStream, *, last: bool) -> Piece:
        if token_id in self.eos_token_ids:
            rest, _ = text.finish()
            return Piece(prompt, rest, token_id, "eos")
        new, stopped = text.push(token_id)
        if last and not stopped:
            rest, stopped = text.finish()
            new += rest
        return Piece(prompt, new, token_id, "stop" if stopped else "length" if last else None)

    def _prepare(self, prompts: list[list[int]], steps: int, sampling: Sampling) -> tuple[Decoder, float]:
        """A decoder with room enough: the last one where it fits, because its cache and graphs are there already."""
        needed = min(max(map(len, prompts)) + steps, self.max_seq_len)
        decoder = self._decoder
        if decoder is None or decoder.batch != len(prompts) or decoder.max_len < needed:
            self.team.synchronize()  # a stream that was not drawn to its end may still be running a graph
            self._decoder = decoder = None  # frees the old cache before the new one is made
            # Attention kernels like a cache length of whole tiles.
            decoder = self._decoder = Decoder(self.model, len(prompts), -(-needed // 128) * 128)
        return decoder, decoder.capture(greedy=sampling.greedy) if self.cuda_graph else 0.0

    def _tokens(
        self, decoder: Decoder, prompts: list[list[int]], sampling: Sampling, steps: int
    ) -> Iterator[list[int]]:
        """The tokens of each step. On GPUs the next step is launched before the host waits for this one's tokens."""
        on_gpu = self.team.device.type == "cuda"
        history = torch.empty(steps, decoder.batch, dtype=torch.int64, pin_memory=on_gpu)
        copied: list[torch.cuda.Event] = []

        def launch(step: int) -> None:
            if step == 0:
                decoder.prefill(prompts, sampling)
            else:
                decoder.step()
            history[step].copy_(decoder.tokens, non_blocking=True)
            if on_gpu:
                copied.append(torch.cuda.Event())
                copied[-1].record()

        lookahead = 1 if on_gpu else 0
        launched = 0
        for step in range(steps):
            while launched <= min(step + lookahead, steps - 1):
                launch(launched)
                launched += 1
            if on_gpu:
                try:
                    copied[step].synchronize()
                except RuntimeError:
                    self.team.synchronize()  # names the wait that gave up, where that is why
                    raise
            yield history[step].tolist()
