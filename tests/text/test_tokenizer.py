"""Pieces of text, joined, are the decoded tokens, whatever characters and stop strings they are cut through."""

import json
import random
import shutil

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from weft.errors import CheckpointError
from weft.text.stream import TextStream, token_texts
from weft.text.tokenizer import AS_IT_IS, load_tokenizer, spellings, token_ids_of


@pytest.fixture(scope="module")
def tokenizer(byte_model) -> Tokenizer:
    return load_tokenizer(byte_model)


def pieces(tokenizer, text, stop=()):
    """(piece after each token until a stop string, the rest, whether it stopped): the same by tokens' own texts."""
    alone = token_texts(tokenizer, keep_special=False)
    found = pieces_of(tokenizer, text, TextStream(tokenizer, stop))
    assert alone is not None and pieces_of(tokenizer, text, TextStream(tokenizer, stop, alone=alone)) == found
    return found


def pieces_of(tokenizer, text, stream):
    found = []
    for token in tokenizer.encode(text).ids:
        piece, stopped = stream.push(token)
        found.append(piece)
        if stopped:
            return found, "", True
    rest, stopped = stream.finish()
    return found, rest, stopped


def test_a_character_of_several_tokens_comes_whole(tokenizer):
    assert pieces(tokenizer, "aé€b") == (["a", "", "é", "", "", "€", "b"], "", False)


def test_a_stop_string_and_special_tokens_are_kept_where_asked_for(tokenizer):
    ids = [*tokenizer.encode("ab").ids, 256, *tokenizer.encode("cSTOPd").ids]

    def text(keep_special=False, **options):
        alone = token_texts(tokenizer, keep_special=keep_special)
        stream = TextStream(tokenizer, ["STOP"], keep_special=keep_special, alone=alone, **options)
        found = ""
        for token in ids:
            piece, stopped = stream.push(token)
            found += piece
            if stopped:
                return found
        raise AssertionError(found)

    assert text() == "abc"
    assert text(keep_stop=True) == "abcSTOP"
    assert text(keep_special=True, keep_stop=True) == "ab<eos>cSTOP"


def test_texts_of_tokens_are_joined_only_for_decoders_that_do_so(tokenizer):
    other = Tokenizer.from_str(tokenizer.to_str())
    for decoder, joins in (
        (decoders.ByteLevel(), True),
        (decoders.Fuse(), True),
        (decoders.Metaspace(), False),
        (decoders.Sequence([decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]), False),
    ):
        other.decoder = decoder
        assert (token_texts(other, keep_special=False) is not None) == joins


def test_an_unfinished_character_comes_at_the_end(tokenizer):
    stream = TextStream(tokenizer)
    ids = tokenizer.encode("a€").ids
    assert [stream.push(token) for token in ids[:3]] == [("a", False), ("", False), ("", False)]
    assert stream.finish() == ("\ufffd", False)


def test_what_a_stop_string_may_begin_with_is_held_back(tokenizer):
    assert pieces(tokenizer, "xaby", ["abc"]) == (["x", "", "", "aby"], "", False)
    assert pieces(tokenizer, "xab", ["abc"]) == (["x", "", ""], "ab", False)
    assert pieces(tokenizer, "xaabcz", ["abc"]) == (["x", "", "a", "", ""], "", True)


def test_of_several_stop_strings_the_first_to_be_complete_wins(tokenizer):
    assert pieces(tokenizer, "one two", ["two", "ne"]) == (["o", "", ""], "", True)
    assert pieces(tokenizer, "aba", ["aba", "b"]) == (["", "a"], "", True)


def test_the_first_stop_string_does_not_depend_on_how_the_text_is_cut_into_tokens(tokenizer):
    one_token = Tokenizer.from_str(tokenizer.to_str())
    one_token.add_tokens(["model"])
    for used in (tokenizer, one_token):
        found, rest, stopped = pieces(used, "a model", ["odel", "e"])
        assert ("".join(found) + rest, stopped) == ("a mod", True)


def test_special_tokens_are_not_text(tokenizer):
    stream = TextStream(tokenizer)
    assert stream.push(tokenizer.token_to_id("<eos>")) == ("", False)
    assert stream.push(tokenizer.encode("a").ids[0]) == ("a", False)


def before_stop(text, stop):
    """(text up to a stop string as soon as one is complete, whether there was one)."""
    for end in range(len(text) + 1):
        begins = [text.find(one, 0, end) for one in stop if one in text[:end]]
        if begins:
            return text[: min(begins)], True
    return text, False


@given(
    text=st.text(st.sampled_from("ab€") | st.characters(codec="utf-8")),
    stop=st.lists(st.text(alphabet="ab€", min_size=1, max_size=3), max_size=2),
)
def test_joined_pieces_are_the_text_before_the_first_stop_string(tokenizer, text, stop):
    found, rest, stopped = pieces(tokenizer, text, stop)
    assert ("".join(found) + rest, stopped) == before_stop(text, stop)


def test_a_directory_without_a_readable_tokenizer_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="no tokenizer.json in it"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(CheckpointError, match="not a readable tokenizer"):
        load_tokenizer(tmp_path)


def token(content, **changes):
    flags = dict.fromkeys(("lstrip", "rstrip", "single_word", "normalized"), False)
    return {"content": content, "special": True} | flags | changes


ADDED = {
    "special": {
        "added_tokens_decoder": {"256": token("<eos>"), "257": token("<x>"), "258": token("<y>", special=False)}
    },
    "stripping": {"added_tokens_decoder": {"257": token("<x>", lstrip=True), "258": token("<y>", rstrip=True)}},
    "whole words": {"added_tokens_decoder": {"257": token("<x>", single_word=True, normalized=True, special=False)}},
    "other flags": {"added_tokens_decoder": {"256": token("<eos>", lstrip=True)}},
    "named": {"added_tokens_decoder": {}, "pad_token": "<pad>", "eos_token": "<eos>", "unk_token": None},
    "lists": {"additional_special_tokens": ["<x>", "<eos>"], "eos_token": "<end>"},
    "a list of today": {"extra_special_tokens": ["<x>"], "image_token": "<y>", "pad_token": "<pad>"},
    "split": {"split_special_tokens": True},
    "nothing": {"model_max_length": 10, "add_bos_token": True, "bos_token": "<eos>"},
    "older files": {},
}


@pytest.mark.parametrize("name", ADDED)
def test_tokens_are_added_as_transformers_adds_them(byte_model, tmp_path, name):
    transformers = pytest.importorskip("transformers")
    directory = shutil.copytree(byte_model, tmp_path / "copy")
    config = {"tokenizer_class": "PreTrainedTokenizerFast"} | ADDED[name]
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    if name == "older files":
        (directory / "special_tokens_map.json").write_text(
            json.dumps({"eos_token": "<eos>", "pad_token": token("<x>")})
        )
        (directory / "added_tokens.json").write_text(json.dumps({"<y>": 257}))
    theirs, ours = transformers.AutoTokenizer.from_pretrained(directory), load_tokenizer(directory)
    for text in ("a <x> b<y> c", "<x><y>q<x>", " <eos> <pad><end>", "b<x>b <y>", "plain"):
        ids = theirs(text)["input_ids"]
        assert ours.encode(text).ids == ids
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def of_sentences():
    """A tokenizer.json as Llama 2's: a blank before each text, also behind a special token; bytes for other characters."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *"▁abc", "▁a", "▁b", "bc"]
    merges = [("▁", "a"), ("▁", "b"), ("b", "c")]
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    made = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    bytes_and_text = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    made.decoder = decoders.Sequence(bytes_and_text)
    made.add_special_tokens(["<unk>", "<s>", "</s>"])
    made.post_processor = processors.TemplateProcessing("<s> $A", "<s> $A <s> $B", [("<s>", 1)])
    return made


def of_letters(*before):
    """A tokenizer.json as GPT-2's, with other steps before its ByteLevel."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {piece: index for index, piece in enumerate([*letters, "Ġa", "bc", "<|endoftext|>"])}
    made = Tokenizer(models.BPE(vocabulary, [("Ġ", "a"), ("b", "c")]))
    made.pre_tokenizer = pre_tokenizers.Sequence([*before, pre_tokenizers.ByteLevel()])  # with a blank before the text
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(["<|endoftext|>"])
    return made


LLAMA = [{}, {"legacy": True}, {"legacy": False}, {"legacy": None}]
LLAMA = [
    legacy | prefix for legacy in LLAMA for prefix in ({}, *({"add_prefix_space": one} for one in (None, True, False)))
]
PREFIXES = [{}, {"add_prefix_space": False}, {"add_prefix_space": True}]
CLASSES = [
    *(("llama", of_sentences, {"tokenizer_class": "LlamaTokenizer"} | config) for config in LLAMA),
    *(("llama", of_sentences, {"tokenizer_class": "CodeLlamaTokenizerFast"} | config) for config in PREFIXES),
    *(("llama", of_letters, {"tokenizer_class": "LlamaTokenizerFast"} | config) for config in PREFIXES),
    *(("llama", of_letters, {"tokenizer_class": "GPT2Tokenizer"} | config) for config in PREFIXES),
    *(("qwen3", of_letters, {"tokenizer_class": "GPT2TokenizerFast"} | config) for config in PREFIXES),
    *(
        (kind, of_sentences, {"tokenizer_class": name, "add_prefix_space": False})
        for kind in ("llama", "mistral", "qwen3", "seed_oss")
        for name in ("LlamaTokenizerFast", "PreTrainedTokenizerFast", "Unheard", None)
        if (kind, name) != ("qwen3", None)  # a class that has no use for these pieces
    ),
    *((kind, of_sentences, {"tokenizer_class": "LlamaTokenizerFast", "add_prefix_space": False}) for kind in AS_IT_IS[1:]),
    *(("granite", of_letters, {"tokenizer_class": "GPT2Tokenizer"} | config) for config in PREFIXES),
]  # fmt: skip
TEXTS = ("a bc", "abc", " a", "  b", "<s>a b</s> a", "a</s>b<s> a", "</s>", "é a", "\nb", "")


# Without ids of functions, whose addresses differ between the processes of a run.
@pytest.mark.parametrize(
    ("model_type", "make", "config"), CLASSES, ids=lambda value: getattr(value, "__name__", None) or str(value)
)
def test_a_blank_before_the_text_is_where_transformers_puts_it(tmp_path, model_type, make, config):
    transformers = pytest.importorskip("transformers", minversion="5.24")
    make().save(str(tmp_path / "tokenizer.json"))
    named = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"} if make is of_sentences else {}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(named | config))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    theirs, ours = transformers.AutoTokenizer.from_pretrained(tmp_path), load_tokenizer(tmp_path)
    for text in TEXTS:
        ids = theirs(text)["input_ids"]
        assert ours.encode(text).ids == ids, text
        expected = theirs.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        assert ours.decode(ids) == expected, text


@pytest.mark.parametrize("config", PREFIXES, ids=str)
def test_qwen_s_blank_is_where_transformers_puts_it(tmp_path, config):
    transformers = pytest.importorskip("transformers", minversion="5.24")
    qwen = transformers.Qwen2Tokenizer(vocab=of_letters().get_vocab(with_added_tokens=False), merges=[("Ġ", "a")])
    qwen.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "tokenizer_config.json").read_text())
    saved.pop("add_prefix_space", None)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(saved | config))
    for model_type in ("qwen2", "qwen3"):
        (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
        theirs, ours = transformers.AutoTokenizer.from_pretrained(tmp_path), load_tokenizer(tmp_path)
        for text in TEXTS:
            assert ours.encode(text).ids == theirs(text)["input_ids"], text


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"added_tokens_decoder": {"300": token("<x>")}},
            "has '<x>' as token 300, and after the tokens .* it is 257; add",
        ),
        ({"added_tokens_decoder": {"x": token("<x>")}}, "added_tokens_decoder is not one of token ids to tokens"),
        ({"added_tokens_decoder": [3]}, "added_tokens_decoder is not one of token ids to tokens"),
        (
            {"added_tokens_decoder": {"257": {"contents": "<x>"}}},
            "added_tokens_decoder is not one of token ids to tokens",
        ),
    ],
    ids=str,
)
def test_a_tokenizer_config_that_cannot_be_followed_is_refused(byte_model, tmp_path, config, message):
    directory = shutil.copytree(byte_model, tmp_path / "copy")
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=message) as caught:
        load_tokenizer(directory)
    assert "\n" not in str(caught.value)


def test_bytes_that_are_no_character_come_without_decoding_all_of_them_again(tokenizer, monkeypatch):
    """They would hold up every stream: each token of one would take as long as all before it."""
    draw, decoded, decode = random.Random(0), [], TextStream._decoded
    monkeypatch.setattr(TextStream, "_decoded", lambda self, ids: decoded.append(len(ids)) or decode(self, ids))
    lead, text = tokenizer.encode("é").ids[:1], tokenizer.encode("aé€😀").ids
    for alone in [None, token_texts(tokenizer, keep_special=False)] * 10:
        ids = [token for _ in range(20) for token in draw.choice([text, text[1:4], lead * draw.randrange(1, 40)])]
        stream = TextStream(tokenizer, alone=alone)
        found = [stream.push(token)[0] for token in ids]
        assert "".join(found) + stream.finish()[0] == tokenizer.decode(ids)
        assert max(decoded) < 64


UNKNOWN = {
    "words": (
        models.WordLevel({"up": 0, "down": 1}, unk_token="<unk>"),
        "prompt='up left right left' has 'left', 'right', which this model does not read; it reads down up",
    ),
    "many words": (
        models.WordLevel({f"w{index}": index for index in range(1000)}, unk_token="<unk>"),
        "has 'up', 'left', 'right', which this model does not read; it reads 1,000 words",
    ),
    "pieces": (models.WordPiece({"up": 0}, unk_token="<unk>"), "prompt='up left right left' WordPiece error: Missing"),
    "likely pieces": (models.Unigram([("up", -1.0)]), "prompt='up left right left' Encountered an unknown token"),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_text_without_tokens_is_one_line(name):
    """A vocabulary without `<unk>` makes tokenizers raise a bare Exception."""
    model, says = UNKNOWN[name]
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(["<eos>"])
    with pytest.raises(ValueError) as caught:
        token_ids_of(tokenizer, "prompt", "up left right left")
    assert says in str(caught.value) and "\n" not in str(caught.value)
    with pytest.raises(ValueError, match="^bad_words='left' "):
        spellings(tokenizer, ["left"])
