"""A text's lower bound is at most its number of tokens, and near it where it must be; long texts are refused untokenized."""

import random

import pytest
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers, trainers

from weft.models.builtin import PATH as BUILTIN
from weft.text import tokenizer as tokenizer_module
from weft.text.tokenizer import PromptReader, TokenBound, load_tokenizer

CORPUS = [
    "the weft is the thread that is drawn through the warp    (123) 4567",
    "Ein Faden läuft quer — ａｂｃ 漢字かな e\u0301",
] * 8
ADDED = [
    AddedToken("<|end|>", special=True, normalized=False, rstrip=True),
    AddedToken("<|Call|>", normalized=True),
    AddedToken("   \n", normalized=False),
]


def trained(model, trainer, pre_tokenizer, normalizer=None, added=()):
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizer
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens(list(added))
    return tokenizer


def of_bytes(normalizer=None, added=(), split=False):
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not split)
    digits = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), level])
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=level.alphabet(), show_progress=False)
    return trained(models.BPE(), trainer, digits if split else level, normalizer, added)


def of_pieces(**options):
    """As sentencepiece's, with a blank for each word and bytes for unknown characters, or one unknown token for a run."""
    fallback = [f"<0x{byte:02X}>" for byte in range(256)] if options.get("byte_fallback") else []
    trainer = trainers.BpeTrainer(vocab_size=600, special_tokens=["<unk>", *fallback], show_progress=False)
    blanks = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return trained(models.BPE(unk_token="<unk>", fuse_unk=True, **options), trainer, None, blanks)


def kinds():
    unigram = trainers.UnigramTrainer(vocab_size=200, unk_token="<unk>", special_tokens=["<unk>"], show_progress=False)
    nfc, nfkc = normalizers.NFC(), normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    removed = pre_tokenizers.Sequence([pre_tokenizers.Split(" ", "removed"), pre_tokenizers.ByteLevel()])
    words = trainers.WordPieceTrainer(vocab_size=300, special_tokens=["[UNK]"], show_progress=False)
    return {
        "builtin": load_tokenizer(BUILTIN),
        "bytes": of_bytes(),
        "bytes, single digits": of_bytes(nfc, split=True),
        "bytes, added tokens": of_bytes(nfkc, ADDED),
        "pieces, bytes": of_pieces(byte_fallback=True),
        "pieces, unknown": of_pieces(),
        "unigram": trained(models.Unigram(), unigram, pre_tokenizers.Metaspace(), normalizers.NFKC()),
        "words": trained(models.WordPiece(unk_token="[UNK]"), words, pre_tokenizers.BertPreTokenizer()),
        "blanks dropped": trained(models.BPE(), trainers.BpeTrainer(show_progress=False), pre_tokenizers.Whitespace()),
        "removed": trained(models.BPE(), trainers.BpeTrainer(show_progress=False), removed),
    }


def test_the_bound_is_never_more_than_the_tokens(monkeypatch):
    draw = random.Random(0)
    units = [*"0123456789=+ \n\t e", " the", "thread", "    ", "漢字", "e\u0301", "\u0301", "ﬁ", "Ａ", "🧵", "<|end|>",
             "<|Call|>", "<|call|>", "<unk>", "\u3000", "   \n", "ß", "▁", "가", "\u1112\u1161\u11ab", "\x07"]  # fmt: skip
    texts = ["".join(draw.choices(draw.sample(units, draw.randint(1, 6)), k=400)) for _ in range(40)]
    texts += [unit * 300 for unit in units]
    for piece in (1 << 16, 64):
        monkeypatch.setattr(tokenizer_module, "_PIECE", piece)
        for name, tokenizer in kinds().items():
            bound = TokenBound(tokenizer)
            for text in texts:
                if name == "builtin":  # which refuses other characters
                    text = "".join(letter for letter in text if letter in "0123456789+=")
                tokens = len(tokenizer.encode(text).ids)
                assert bound.least(text, 1 << 30) <= tokens, (name, text[:40])


def test_the_bound_is_near_where_characters_have_short_tokens():
    text = "1" * (1 << 17)
    found = {name: TokenBound(tokenizer).least(text, 1 << 30) / len(text) for name, tokenizer in kinds().items()}
    assert min(found[name] for name in ("builtin", "bytes, single digits", "unigram")) > 0.99
    assert found["bytes"] > 0.3 and found["pieces, bytes"] > 0.01
    assert found["words"] == found["removed"] == 0, "any number of characters can become one token"
    assert TokenBound(load_tokenizer(BUILTIN)).least(text, 64) < 1 << 17, "it counts no further than it needs"


def test_a_long_text_is_refused_before_it_is_tokenized():
    tokenizer = load_tokenizer(BUILTIN)
    reader = PromptReader(tokenizer, 64)
    with pytest.raises(
        ValueError, match="^prompt has 200 tokens and leaves no room for an answer in max_seq_len=64; shorten it"
    ):
        reader.read("prompt", "1" * 200)
    reader._bound, reader._tokenizer = TokenBound(tokenizer), None
    with pytest.raises(
        ValueError, match="^prompt has more than 63 tokens and leaves no room for an answer in max_seq_len=64"
    ):
        reader.read("prompt", "1" * (1 << 20))
