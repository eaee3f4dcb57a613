"""The bytes of an answer's tokens, joined, are its text, for each kind of decoder, also of parts of characters."""

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from weft.text.tokenizer import BYTE_OF, TokenBytes

TEXT = "héllo wörld, 语言 is 🙂 fine"


def byte_level():
    """GPT-2's, Llama 3's, Qwen's: letters that stand for bytes."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("h", "Ã"), ("Ġ", "w")]
    vocab = {piece: index for index, piece in enumerate([*letters, *map("".join, merges)])}
    tokenizer = Tokenizer(models.BPE(vocab, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|end of text|>")])
    return tokenizer


def byte_fallback():
    """Sentencepiece's, as of Llama 2 and Gemma: a mark for the blank, and tokens for bytes."""
    pieces = ["<unk>", "<s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"hellowrdisfn,"]
    merges = [("▁", "w"), ("▁", "i"), ("▁i", "s"), ("l", "o")]
    vocab = {piece: index for index, piece in enumerate(dict.fromkeys([*pieces, *map("".join, merges)]))}
    tokenizer = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)
    tokenizer.decoder = decoders.Sequence(list(steps))
    tokenizer.add_special_tokens(["<s>"])
    return tokenizer


def metaspace():
    """Sentencepiece's without bytes, as of T5."""
    pieces = [("<unk>", -9.0), *((letter, -3.0) for letter in sorted({*TEXT} - {" "})), ("▁", -3.0), ("▁wör", -1.0)]
    tokenizer = Tokenizer(models.Unigram(pieces, 0, False))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    return tokenizer


def word_piece():
    """BERT's: the decoder writes the blanks."""
    words = ["[UNK]", "hé", "##llo", "wör", "##ld", ",", "语言", "is", "🙂", "fine"]
    tokenizer = Tokenizer(models.WordPiece({word: index for index, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    return tokenizer


@pytest.mark.parametrize("made", [byte_level, byte_fallback, metaspace, word_piece], ids=lambda made: made.__name__)
def test_the_bytes_of_tokens_joined_are_the_text(made):
    tokenizer = made()
    ids = tokenizer.encode(TEXT, add_special_tokens=False).ids
    tokens = TokenBytes(tokenizer)
    joined = b"".join(tokens[token] for token in ids)
    assert joined.decode().removeprefix(" ") == TEXT == tokenizer.decode(ids)
    assert tokens[tokenizer.get_vocab_size()] is None
    partial = [token for token in ids if "\ufffd" in tokenizer.decode([token])]
    assert (len(partial) > 5) == (made in (byte_level, byte_fallback))
    assert all(0 < len(tokens[token]) < 4 for token in partial)


def test_special_tokens_bytes_and_blanks_are_what_they_add():
    tokenizer = byte_level()
    tokens = TokenBytes(tokenizer)
    assert tokens[tokenizer.token_to_id("<|end of text|>")] == b"<|end of text|>"
    assert tokens[tokenizer.token_to_id("hÃ")] == b"h\xc3" and tokens[tokenizer.token_to_id("Ġw")] == b" w"
    assert {*BYTE_OF} == {*pre_tokenizers.ByteLevel.alphabet()} and sorted(BYTE_OF.values()) == list(range(256))
    tokenizer = byte_fallback()
    tokens = TokenBytes(tokenizer)
    assert [tokens[tokenizer.token_to_id(name)] for name in ("<0xE4>", "▁is", "<s>")] == [b"\xe4", b" is", b"<s>"]
    tokenizer = word_piece()
    assert [TokenBytes(tokenizer)[tokenizer.token_to_id(name)] for name in ("##ld", "is", ",")] == [b"ld", b" is", b","]
    tokenizer.decoder = None
    assert TokenBytes(tokenizer)[tokenizer.token_to_id("is")] == b" is"
