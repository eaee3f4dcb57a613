"""Token ids to text, piece by piece, up to a stop string."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer

from weft.errors import CheckpointError


def load_tokenizer(directory: Path) -> Tokenizer:
    """From tokenizer.json alone: importing transformers would take longer than loading a small model."""
    path = directory / "tokenizer.json"
    if not path.exists():
        raise CheckpointError(f"{directory}: no tokenizer.json in it; save the model's fast tokenizer there")
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises bare Exceptions
        raise CheckpointError(f"{path}: not a readable tokenizer ({error}); download it again") from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


class TextStream:
    """Text of a growing sequence of tokens: pieces that, joined, are the text before a stop string.

    Of several stop strings the first to be complete counts. Held back until decided: the bytes of an unfinished
    character, and an ending that a stop string may begin with.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = ()) -> None:
        self.tokenizer, self.stop = tokenizer, tuple(stop)
        self.token_ids: list[int] = []
        self.held = ""
        # Tokens before `read` are text already; from `first` on they are decoded again with each new one, because some
        # decoders treat the first token differently (a leading blank).
        self.first = self.read = 0

    def push(self, token_id: int) -> tuple[str, bool]:
        """(new text, whether a stop string ended it)."""
        self.token_ids.append(token_id)
        new = self._new_text()
        if new and not new.endswith("\ufffd"):
            self.held += new
            self.first, self.read = self.read, len(self.token_ids)
        return self._release()

    def finish(self) -> tuple[str, bool]:
        """What was held back, now that no token follows."""
        self.held += self._new_text()
        self.first = self.read = len(self.token_ids)
        text, stopped = self._release()
        rest, self.held = self.held, ""
        return (text, True) if stopped else (text + rest, False)

    def _new_text(self) -> str:
        before = self.tokenizer.decode(self.token_ids[self.first : self.read])
        return self.tokenizer.decode(self.token_ids[self.first :])[len(before) :]

    def _release(self) -> tuple[str, bool]:
        found = [(at + len(stop), at) for stop in self.stop if (at := self.held.find(stop)) >= 0]
        if found:
            text, self.held = self.held[: min(found)[1]], ""
            return text, True
        keep = max((_overlap(self.held, stop) for stop in self.stop), default=0)
        text, self.held = self.held[: len(self.held) - keep], self.held[len(self.held) - keep :]
        return text, False


def _overlap(text: str, stop: str) -> int:
    """The length of the longest ending of `text` that `stop` begins with."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
