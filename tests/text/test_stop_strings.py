"""Stop strings are found as by a search for each of them, wherever tokens split them; their number costs no time a step."""

import random

import pytest
from tokenizers import decoders

from tests.text.test_prompt_length import of_bytes
from weft.engine import SamplingParams
from weft.engine.params import MOST_BAD_WORDS, MOST_CHARACTERS, MOST_STOPS
from weft.text.stream import StopStrings, TextStream, token_texts


def searched(text, stop, keep_stop):
    """(text before the stop string that ends first, the longest of those; whether there is one), by a search for each."""
    found = [(at + len(one), at) for one in stop if (at := text.find(one)) >= 0]
    if not found:
        return text, False
    end, begin = min(found)
    return text[: end if keep_stop else begin], True


def held_back(text, stop):
    """Length of the longest ending that may begin a stop string."""
    return max(
        (n for one in stop for n in range(1, min(len(text), len(one) - 1) + 1) if text.endswith(one[:n])), default=0
    )


def test_random_texts_end_where_a_search_for_each_string_ends_them():
    draw, stopped_at = random.Random(0), 0
    for case in range(3000):
        letters = "ab" if case % 2 else "abß"
        stop = ["".join(draw.choices(letters, k=draw.randint(1, 5))) for _ in range(draw.randint(0, 6))]
        text = "".join(draw.choices(letters, k=24))
        found, state, held = StopStrings(stop), 0, ""
        for end in range(1, len(text) + 1):
            state, at = found.advance(state, held + text[end - 1], found.depth[state])
            expected, stopped = searched(text[:end], stop, False)
            assert (found.longest[state] > 0) == stopped, (stop, text[:end])
            if stopped:
                assert end - found.longest[state] == len(expected)
                stopped_at += 1
                break
            held = text[end - found.depth[state] : end]
            assert found.depth[state] == held_back(text[:end], stop), (stop, text[:end])
    assert 1000 < stopped_at < 3000


@pytest.mark.parametrize("keep_stop", [False, True])
def test_streams_of_tokens_give_the_searched_text_and_hold_back_what_may_begin_a_string(keep_stop):
    draw, tokenizer = random.Random(1), of_bytes()
    tokenizer.decoder = decoders.ByteLevel()
    texts, ends = token_texts(tokenizer, keep_special=False), set()
    for case in range(400):
        words = draw.choices(["the", " weft", "ä", "漢", " ", "th", "e w", "\n", "🧵", "aa", "a"], k=12)
        text = "".join(words)
        stop = (
            [text[at : at + draw.randint(1, 6)] for at in draw.sample(range(len(text)), 2)]
            if case % 3
            else ["the wa", "x"]
        )
        # Tokens of single bytes at times, so that characters and strings are split.
        ids = [token for word in words for token in tokenizer.encode(word).ids]
        if case % 2:
            letters = [letter for token in ids for letter in tokenizer.id_to_token(token)]
            ids = [tokenizer.token_to_id(letter) for letter in letters]
        stream = TextStream(tokenizer, stop, keep_stop=keep_stop, alone=texts if case % 4 < 2 else None)
        found, stopped = "", False
        for taken, token in enumerate(ids, 1):
            piece, stopped = stream.push(token)
            found += piece
            if stopped:
                break
            known = tokenizer.decode(ids[:taken]).rstrip("\ufffd")
            assert len(found) <= len(known) - held_back(known, stop)
        if not stopped:
            piece, stopped = stream.finish()
            found += piece
        assert (found, stopped) == searched(text, stop, keep_stop), (stop, text)
        ends.add(stopped)
    assert ends == {True, False}


def test_a_character_is_one_transition_whatever_the_number_of_strings(monkeypatch):
    """Of strings that all begin alike, where a search for each would look at all of them."""
    steps, step = [], StopStrings._step
    for strings in (["a" * 16 + "b"], ["a" * length + "b" for length in range(1, 300)]):
        made = StopStrings(strings)
        steps.clear()
        monkeypatch.setattr(
            StopStrings, "_step", lambda self, state, letter: steps.append(1) or step(self, state, letter)
        )
        made.advance(0, "ac" * 500, 0)
        monkeypatch.undo()
        assert len(steps) == 1000


def test_numbers_and_lengths_have_limits():
    fits = {"stop": ["x" * 16] * MOST_STOPS, "bad_words": ["x" * (MOST_CHARACTERS // MOST_BAD_WORDS)] * MOST_BAD_WORDS}
    for name, strings in fits.items():
        assert getattr(SamplingParams(**{name: strings}), name) == tuple(strings)
        with pytest.raises(
            ValueError, match=rf"^{name} has {len(strings) + 1:,} strings; pass at most {len(strings):,}$"
        ):
            SamplingParams(**{name: ["x"] * (len(strings) + 1)})
        with pytest.raises(ValueError, match=rf"^{name} has 65,537 characters in all; pass at most 65,536$"):
            SamplingParams(**{name: ["x" * 65_536, "x"]})
