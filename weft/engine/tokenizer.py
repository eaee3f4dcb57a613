"""Tokenizer of a checkpoint, and the text of a growing sequence of tokens up to a stop string."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models

from weft.arguments import quoted, shortened
from weft.engine.stop_strings import StopStrings
from weft.engine.tokenizer_class import DEFAULTS, class_of, follow_class
from weft.errors import CheckpointError
from weft.models.files import check_regular, read_object

# Decoders that join tokens' bytes or texts as they are.
JOINING = (decoders.ByteLevel, decoders.Fuse)
# Tokens behind which a character that has not ended is none: it has up to 4 bytes.
MOST_UNDECIDED = 16
# Words of a vocabulary that a message lists.
MOST_LISTED = 40
# transformers' named special tokens, in the order in which it adds them.
SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def has_tokenizer(directory: Path) -> bool:
    """True if a checkpoint can read and write text."""
    return (directory / "tokenizer.json").exists()


def load_tokenizer(directory: Path) -> Tokenizer:
    """Tokenizer of tokenizer.json, as tokenizer_config.json extends and changes it in transformers.

    Without transformers: importing it would take longer than loading a small model.
    """
    if not has_tokenizer(directory):
        raise CheckpointError(f"{directory}: no tokenizer.json in it; save the model's fast tokenizer there")
    path = directory / "tokenizer.json"
    check_regular(path)
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises bare Exceptions
        raise CheckpointError(f"{path}: not a readable tokenizer ({error}); download it again") from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    config = _tokenizer_config(directory)
    follow_class(tokenizer, class_of(directory, config), config)
    _add_tokens(tokenizer, config, directory / "tokenizer_config.json")
    return tokenizer


def _add_tokens(tokenizer: Tokenizer, config: Mapping[str, Any], at: Path) -> None:
    if config.get("split_special_tokens"):
        tokenizer.encode_special_tokens = True
    listed: dict[int, AddedToken] = {}
    try:
        for token_id, value in (config.get("added_tokens_decoder") or {}).items():
            listed[int(token_id)] = AddedToken(value["content"], **{k: v for k, v in value.items() if k != "content"})
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{at}: added_tokens_decoder is not one of token ids to tokens ({error!r})") from None
    special = _special_tokens(config)
    have = tokenizer.get_added_tokens_decoder()
    new = [token for token_id, token in sorted(listed.items()) if repr(have.get(token_id)) != repr(token)]
    for token in new:
        token.special = token.special or token.content in special
    names = {token.content for token in (*have.values(), *new)}
    new += [AddedToken(name, special=True) for name in dict.fromkeys(special) if name not in names]
    if new:
        tokenizer.add_tokens(new)
    for token_id, token in listed.items():
        if (found := tokenizer.token_to_id(token.content)) != token_id:
            raise CheckpointError(
                f"{at}: added_tokens_decoder has {token.content!r} as token {token_id}, and behind those of tokenizer.json it "
                f"is {found}; add it to tokenizer.json"
            )


def _tokenizer_config(directory: Path) -> dict[str, Any]:
    """Content of tokenizer_config.json, and of older checkpoints' special_tokens_map and added_tokens."""

    def read(name: str) -> dict[str, Any]:
        return read_object(directory / name) if (directory / name).exists() else {}

    config = read("tokenizer_config.json")
    if "added_tokens_decoder" not in config:
        config = {**config, **read("special_tokens_map.json")}
        special = set(_special_tokens(config))
        config["added_tokens_decoder"] = {
            token_id: {"content": name, "special": name in special, "normalized": name not in special}
            for name, token_id in read("added_tokens.json").items()
        }
    return config


def named_tokens(directory: Path) -> dict[str, str]:
    """Special tokens by the names that a chat template has for them, such as bos_token."""
    config = _tokenizer_config(directory)
    return _named({**DEFAULTS.get(class_of(directory, config), {}), **config})


def _named(config: Mapping[str, Any]) -> dict[str, str]:
    """Special tokens by name, first those that all tokenizers may have, then a model's own."""
    others = [name for name in config if name.endswith("_token") and name not in SPECIAL]
    found = {name: config.get(name) for name in (*SPECIAL, *others)}
    if isinstance(extra := _extra(config), Mapping):
        found |= extra
    return {name: text for name, value in found.items() if (text := _content(value)) is not None}


def _special_tokens(config: Mapping[str, Any]) -> list[str]:
    """All special tokens: those by name, then those that are only listed."""
    extra = _extra(config)
    listed = [text for one in extra if (text := _content(one)) is not None] if isinstance(extra, list) else []
    return [*_named(config).values(), *listed]


def _extra(config: Mapping[str, Any]) -> Any:
    """A model's own special tokens: a list, or an object with their names."""
    return config.get("extra_special_tokens") or config.get("additional_special_tokens")


def _content(token: Any) -> str | None:
    content = token.get("content") if isinstance(token, Mapping) else token
    return content if isinstance(content, str) else None


def token_ids_of(tokenizer: Tokenizer, name: str, text: str, *, special: bool = True) -> list[int]:
    """Token ids of a text. ValueError for one that the tokenizer has no tokens for.

    name     of the text, in messages
    special  with the tokens that the tokenizer puts around a text
    """
    try:
        return tokenizer.encode(text, add_special_tokens=special).ids
    except Exception as error:  # tokenizers raises bare Exceptions
        raise ValueError(f"{name}={quoted(text)} {_unreadable(tokenizer, text) or error}") from None


def _unreadable(tokenizer: Tokenizer, text: str) -> str:
    """Rule broken by a text with words that a vocabulary of whole words lacks; "" for another model."""
    if not isinstance(tokenizer.model, models.WordLevel):
        return ""
    added = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    for token in added:
        text = text.replace(token, "")
    if tokenizer.normalizer is not None:
        text = tokenizer.normalizer.normalize_str(text)
    words = [text]
    if tokenizer.pre_tokenizer is not None:
        words = [word for word, _ in tokenizer.pre_tokenizer.pre_tokenize_str(text)]
    known = [word for word in tokenizer.get_vocab(with_added_tokens=False) if word not in added]
    lacking = ", ".join(map(repr, dict.fromkeys(word for word in words if word not in {*known})))
    reads = f"{len(known):,} words" if len(known) > MOST_LISTED else " ".join(sorted(known))
    return f"has {shortened(lacking)}, which this model does not read; it reads {reads}"


def spellings(tokenizer: Tokenizer | None, words: Sequence[str]) -> list[list[int]]:
    """Token ids of each word, and of it behind a blank if its first token alone changes, as in vLLM."""
    found = []
    for word in words:
        alone = token_ids_of(tokenizer, "bad_words", word.lstrip(), special=False)
        try:
            behind = token_ids_of(tokenizer, "bad_words", " " + word.lstrip(), special=False)
        except ValueError:  # the tokenizer has no blank
            behind = []
        if not alone:
            raise ValueError(f"bad_words: {quoted(word)} has no tokens")
        found.append(alone)
        if behind and behind[0] != alone[0] and len(behind) == len(alone):
            found.append(behind)
    return found


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
    """Texts of tokens by themselves, if these make up the text of all of them.

    None for a decoder that looks at several tokens at once.
    """
    return TokenTexts(tokenizer, keep_special=keep_special) if isinstance(tokenizer.decoder, JOINING) else None


class TextStream:
    """Text of a growing sequence of tokens: pieces that, joined, are the text before a stop string.

    keep_stop     the text ends behind the stop string
    keep_special  special tokens have text too
    alone         `token_texts` with this keep_special: one look-up a token in place of decoding two; None: none are known

    The first stop string that is complete counts. Bytes of an unfinished character, and an ending that may begin a stop string,
    are held back until they are decided; of bytes that are no character the last alone, or each token would decode all of them.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop: StopStrings | Sequence[str] = (),
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
        self.ahead = 0  # characters behind `read` that are text already
        self._given = self._waiting = 0  # characters given out, and those before an unfinished one

    @property
    def length(self) -> int:
        """Number of characters of the text so far, those held back included, without an unfinished one."""
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
