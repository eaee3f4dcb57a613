"""A completion with `echo` has its prompt before it, with the log-probabilities that the model gives the prompt's tokens."""

import pytest

PROMPT = "123+456="


def chosen(client, prefix, token):
    """Log-probability of a token after a prefix, from a request that may choose no other token."""
    found = client.completions.create(
        model="adder", prompt=prefix, max_tokens=1, logprobs=0, extra_body={"allowed_token_ids": [token]}
    )
    return found.choices[0].logprobs.token_logprobs[0]


def test_the_prompt_is_scored_as_if_the_model_had_written_it(client, served):
    ids = served.llm.tokenizer.encode(PROMPT).ids
    ask = {"model": "adder", "max_tokens": 1, "logprobs": 1, "echo": True, "temperature": 0}
    by_text = client.completions.create(prompt=PROMPT, **ask)
    by_ids = client.completions.create(prompt=ids, **ask)
    again = client.completions.create(prompt=PROMPT, **ask)  # whose pages are in the prefix cache
    assert by_text.choices == by_ids.choices == again.choices
    [choice] = by_text.choices
    scored = choice.logprobs
    assert choice.text == PROMPT + "5" and scored.tokens == [*PROMPT, "5"]
    assert scored.text_offset == list(range(9)) and scored.top_logprobs[0] is scored.token_logprobs[0] is None
    expected = [chosen(client, ids[:index], ids[index]) for index in range(1, len(ids))]
    assert scored.token_logprobs[1:-1] == pytest.approx(expected, abs=0.05)  # passes of other lengths round unlike
    for logprob, token, top in zip(scored.token_logprobs[1:], scored.tokens[1:], scored.top_logprobs[1:], strict=True):
        assert top[token] == logprob <= max(top.values()) and len(top) <= 2
    assert by_text.usage.prompt_tokens == 8 and by_text.usage.completion_tokens == 1


def test_streams_begin_with_the_prompt_of_each_choice(client):
    ask = {"model": "adder", "prompt": ["1+2=", [3, 4]], "n": 2, "max_tokens": 2, "echo": True, "logprobs": 0}
    whole = client.completions.create(**ask).choices
    pieces = [one for chunk in client.completions.create(**ask, stream=True) for one in chunk.choices]
    for choice in whole:
        parts = [one for one in pieces if one.index == choice.index]
        assert "".join(one.text for one in parts) == choice.text
        assert [x for one in parts for x in one.logprobs.token_logprobs] == choice.logprobs.token_logprobs
        assert [x for one in parts for x in one.logprobs.text_offset] == choice.logprobs.text_offset
    assert whole[0].text.startswith("1+2=") and len(whole[2].logprobs.tokens) == 4


def test_an_echo_alone_has_no_answer(client):
    ask = {"model": "adder", "prompt": PROMPT, "echo": True, "max_tokens": 0}
    found = client.completions.create(**ask, logprobs=1)
    assert found.choices[0].text == PROMPT and found.choices[0].finish_reason == "length"
    assert len(found.choices[0].logprobs.tokens) == len(PROMPT) and found.usage.completion_tokens == 0
    bare = client.completions.create(**ask)
    assert bare.choices[0].text == PROMPT and bare.choices[0].logprobs is None
    streamed = list(client.completions.create(**ask, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].text for chunk in streamed if chunk.choices) == PROMPT
    assert streamed[-1].usage.completion_tokens == 0


def test_only_completions_are_echoed(client):
    import openai

    messages = [{"role": "user", "content": PROMPT}]
    with pytest.raises(openai.BadRequestError, match="echo=True is not supported"):
        client.chat.completions.create(model="adder", messages=messages, extra_body={"echo": True})
    for wrong, message in (({"echo": 1}, "echo=1 is not True or False"), ({"max_tokens": 0}, "max_tokens=0 is not")):
        with pytest.raises(openai.BadRequestError, match=message):
            client.completions.create(model="adder", prompt="1", extra_body=wrong)
