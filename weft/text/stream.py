"""Text of a growing answer's tokens, and the strings that end it."""

from __future__ import annotations

from tokenizers import Tokenizer, decoders


class StopStrings:
    """Automaton of strings.

    A state is the longest ending of the text so far that some string begins with; 0 is the empty one.

    empty    there is no string
    depth    of each state, its length
    longest  of each state, the length of the longest string that ends there, or 0
    """

    def __init__(self, strings: tuple[str, ...]) -> None:
        self.empty = not strings
        self._next: list[dict[str, int]] = [{}]
        self.depth, self.longest = [0], [0]
        for string in strings:
            state = 0
            for letter in string:
                if (after := self._next[state].get(letter)) is None:
                    after = self._next[state][letter] = len(self._next)
                    self._next.append({})
                    self.depth.append(self.depth[state] + 1)
                    self.longest.append(0)
                state = after
            self.longest[state] = len(string)
        # State of the longest shorter ending; states are taken by their depth.
        self._shorter = [0] * len(self._next)
        ordered = list(self._next[0].values())
        for state in ordered:
            for letter, after in self._next[state].items():
                shorter = self._shorter[after] = self._step(self._shorter[state], letter)
                self.longest[after] = self.longest[after] or self.longest[shorter]
                ordered.append(after)

    def advance(self, state: int, text: str, begin: int) -> tuple[int, int]:
        """(state, end) after the characters from `begin` on, or after the first complete string."""
        for index in range(begin, len(text)):
            state = self._step(state, text[index])
            if self.longest[state]:
                return state, index + 1
        return state, len(text)

    def _step(self, state: int, letter: str) -> int:
        while state and letter not in self._next[state]:
            state = self._shorter[state]
        return self._next[state].get(letter, 0)


# Decoders that join tokens' bytes or texts as they are.
JOINING = (decoders.ByteLevel, decoders.Fuse)
# Tokens after which a character that has not ended is none: it has up to 4 bytes.
MOST_UNDECIDED = 16


class TokenTexts(dict[int, str]):
    """Text of each token by itself, decoded when first asked for.

    "\ufffd" in it stands for bytes that are no character.
    """

    def __init__(self, tokenizer: Tokenizer, *, keep_special: bool) -> None:
        super().__init__()
        self._decode, self._skip = tokenizer.decode, not keep_special

    def __missing__(self, token_id: int) -> str:
        text = self[token_id] = self._decode([token_id], skip_special_tokens=self._skip)
        return text


def token_texts(tokenizer: Tokenizer, *, keep_special: bool) -> TokenTexts | None:
    """Texts of single tokens, to be joined; None for a decoder that looks at several tokens at once."""
    return TokenTexts(tokenizer, keep_special=keep_special) if isinstance(tokenizer.decoder, JOINING) else None


class TextStream:
    """Text of a growing sequence of tokens: pieces that, joined, are the text before a stop string.

    keep_stop     the text includes the stop string
    keep_special  special tokens have text too
    alone         `token_texts` with this keep_special: one look-up a token in place of decoding two; None: none are known

    The first stop string that is complete counts. Bytes of an unfinished character, and an ending that may begin a stop string,
    are held back until they are decided. Of bytes that are no character only the last is, so that a token decodes few bytes.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop: StopStrings | tuple[str, ...] = (),
        *,
        keep_stop: bool = False,
        keep_special: bool = False,
        alone: TokenTexts | None = None,
    ) -> None:
        self.tokenizer, self.alone = tokenizer, alone
        self._stops, self._state = stop if isinstance(stop, StopStrings) else StopStrings(stop), 0
        self.keep_stop, self.keep_special = keep_stop, keep_special
        self.token_ids: list[int] = []
        self.held = ""
        # Tokens before `read` are text already; from `first` on they are decoded again with each new one, because some
        # decoders treat the first token differently (a leading blank).
        self.first = self.read = 0
        self.ahead = 0  # characters after `read` that are text already
        self._given = self._waiting = 0  # characters given out, and characters that wait for an unfinished one

    @property
    def length(self) -> int:
        """Number of characters of the text so far, also of held back ones, without an unfinished one."""
        return self._given + len(self.held) + self._waiting

    def push(self, token_id: int) -> tuple[str, bool]:
        """(new text, whether a stop string ended it)."""
        decided = self.read == len(self.token_ids)
        self.token_ids.append(token_id)
        if decided and self.alone is not None and "\ufffd" not in (new := self.alone[token_id]):
            self.first, self.read = self.read, self.read + 1
            if self._stops.empty:
                self._given += len(new)
                return new, False
            self.held += new
            return self._release()
        new = self._new_text()
        self._waiting = 0
        if new and not new.endswith("\ufffd"):
            self.held += new
            self.first, self.read, self.ahead = self.read, len(self.token_ids), 0
        elif len(self.token_ids) - self.read > 2 * MOST_UNDECIDED:
            self.held += new[:-1]
            self.first = self.read = len(self.token_ids) - MOST_UNDECIDED
            self.ahead = len(self._decoded(self.token_ids[self.first :])) - 1
        else:
            self._waiting = len(new.rstrip("\ufffd"))
        return self._release()

    def finish(self) -> tuple[str, bool]:
        """Text that was held back, now that no token follows, as from `push`."""
        self.held += self._new_text()
        self.first, self.read, self.ahead, self._waiting = len(self.token_ids), len(self.token_ids), 0, 0
        text, stopped = self._release()
        self._given += len(self.held)
        rest, self.held, self._state = self.held, "", 0
        return (text, True) if stopped else (text + rest, False)

    def _new_text(self) -> str:
        before = self._decoded(self.token_ids[self.first : self.read])
        return self._decoded(self.token_ids[self.first :])[len(before) + self.ahead :]

    def _decoded(self, token_ids: list[int]) -> str:
        return self.tokenizer.decode(token_ids, skip_special_tokens=not self.keep_special)

    def _release(self) -> tuple[str, bool]:
        # What was held back is what the state stands for.
        state, end = self._stops.advance(self._state, self.held, self._stops.depth[self._state])
        if stop := self._stops.longest[state]:
            text, self.held, self._state = self.held[: end if self.keep_stop else end - stop], "", 0
        else:
            keep = self._stops.depth[state]
            text, self.held, self._state = self.held[: end - keep], self.held[end - keep :], state
        self._given += len(text)
        return text, stop > 0
