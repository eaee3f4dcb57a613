"""Log-probabilities in OpenAI's shapes: bytes of tokens, keys by text, offsets of tokens whose text is held back."""

import json
import math

import pytest
from tokenizers import Tokenizer, models

from tests.text.test_token_bytes import byte_fallback, byte_level
from weft.engine.answers import Answer, Logprob, Piece
from weft.engine.params import MOST_LOGPROBS, SamplingParams
from weft.serve.app import as_json
from weft.serve.logprobs import LEAST, of_chat, of_completion
from weft.text.stream import TextStream, token_texts
from weft.text.tokenizer import TokenBytes


def row(token, *others):
    """Row of weft.engine.sampling of a token that is the likeliest one, with others behind it."""
    likeliest = [token, *others]
    logprobs = [-1.0 - rank for rank in range(len(likeliest))]
    rest = MOST_LOGPROBS - len(likeliest)
    return [-1.0, 1.0, *logprobs, *[-math.inf] * rest, *map(float, likeliest), *[0.0] * rest]


def pieces_of(tokenizer, ids, stop=(), ends=(), others=()):
    """Pieces of an answer of these tokens."""
    params = SamplingParams(logprobs=3, stop=stop, max_tokens=len(ids))
    text = TextStream(tokenizer, stop, alone=token_texts(tokenizer, keep_special=False))
    answer = Answer(
        prompt=[0], params=params, budget=len(ids), ends=dict.fromkeys(ends, "eos"), text=text, decode=lambda token: ""
    )
    for token in ids:
        answer.take(token, row(token, *others))
    return answer.pieces


TEXTS = ["语abc", "ä🙂 x🙂🙂y", "é" * 20, "plain"]


@pytest.mark.parametrize("stop", [(), ("abcd", "🙂🙂z"), ("never",)], ids=str)
def test_a_token_s_offset_is_the_characters_before_it_also_where_text_is_held_back(stop):
    tokenizer = byte_level()
    for text in TEXTS:
        ids = [tokenizer.token_to_id(letter) for letter in tokenizer.pre_tokenizer.pre_tokenize_str(text)[0][0]]
        end = tokenizer.token_to_id("<|end of text|>")
        found = of_completion(pieces_of(tokenizer, [*ids, end], stop, ends=[end]), 3, TokenBytes(tokenizer))
        before = [text.encode()[:count] for count in range(len(ids) + 1)]
        assert found["text_offset"] == [len(one.decode(errors="ignore")) for one in before]
    assert len(found["text_offset"]) == len("plain") + 1


def test_the_blank_that_a_text_does_not_begin_with_has_no_offset():
    tokenizer = byte_fallback()
    ids = tokenizer.encode("is 语 is", add_special_tokens=False).ids
    pieces = pieces_of(tokenizer, ids)
    found = of_completion(pieces, 3, TokenBytes(tokenizer))
    assert found["tokens"] == [" is", " ", "bytes:\\xe8", "bytes:\\xaf", "bytes:\\xad", " is"]
    assert found["text_offset"] == [0, 2, 3, 3, 3, 4] and "".join(piece.text for piece in pieces) == "is 语 is"


def test_parts_of_characters_have_their_bytes_and_keys_of_their_own():
    tokenizer = byte_level()
    tokens = TokenBytes(tokenizer)
    parts = [next(token for token in range(256) if tokens[token] == bytes([byte])) for byte in (228, 229, 230)]
    mixed, end = tokenizer.token_to_id("hÃ"), tokenizer.token_to_id("<|end of text|>")
    pieces = pieces_of(tokenizer, [parts[0], mixed, end], others=(parts[1], parts[2]))
    chat = of_chat(pieces, 3, tokens)["content"]
    assert [one["bytes"] for one in chat] == [[228], [104, 195], list(b"<|end of text|>")]
    assert [one["token"] for one in chat] == ["bytes:\\xe4", "bytes:h\\xc3", "<|end of text|>"]
    assert [one["bytes"] for one in chat[0]["top_logprobs"]] == [[228], [229], [230]]
    found = of_completion(pieces, 3, tokens)
    assert found["tokens"] == [one["token"] for one in chat]
    assert found["top_logprobs"][0] == {"bytes:\\xe4": -1.0, "bytes:\\xe5": -2.0, "bytes:\\xe6": -3.0}
    json.loads(as_json(found))


def test_of_tokens_with_one_text_none_is_lost_and_the_chosen_one_keeps_it():
    tokenizer = byte_fallback()
    spelled, fallback, blank = (tokenizer.token_to_id(name) for name in ("h", "<0x68>", "▁"))
    logprobs = {token: Logprob(-float(rank), rank, None) for rank, token in ((3, fallback), (1, spelled), (2, blank))}
    piece = Piece(0, "h", fallback, None, logprobs, offset=0)
    [top] = of_completion([piece], 2, TokenBytes(tokenizer))["top_logprobs"]
    assert top == {"h": -3.0, f"token_id:{spelled}": -1.0, " ": -2.0}
    listed = of_chat([piece], 2, TokenBytes(tokenizer))["content"][0]["top_logprobs"]
    assert [(one["token"], one["logprob"]) for one in listed] == [("h", -1.0), (" ", -2.0)]


def test_without_text_tokens_have_their_ids_and_minus_infinity_is_the_least():
    piece = Piece(0, None, 5, "length", {5: Logprob(-math.inf, 9, None), 4: Logprob(-0.5, 1, None)})
    [one] = of_chat([piece], 1, None)["content"]
    assert (one["token"], one["logprob"], one["bytes"]) == ("token_id:5", LEAST, None)
    assert of_completion([piece], 1, None) == {
        "tokens": ["token_id:5"], "token_logprobs": [LEAST], "top_logprobs": [{"token_id:5": LEAST, "token_id:4": -0.5}],
        "text_offset": [0],
    }  # fmt: skip
    few = Tokenizer(models.WordLevel({"a": 0}, "a"))
    assert of_completion([piece], 1, TokenBytes(few))["tokens"] == ["token_id:5"]
    with pytest.raises(ValueError, match="Out of range float"):
        as_json({"logprob": math.nan})
