"""Vectors of texts are those of transformers' model of the same weights: the last token's, or the mean of all tokens'."""

import base64
import json

import numpy
import pytest
import torch

from weft.models.builtin import PATH

TEXTS = ["123+456=", "7+8=", "1", "99+1=" * 9]


@pytest.fixture(scope="module")
def expected():
    """Normed outputs of the last layer, by text, from transformers in fp32."""
    import transformers

    from weft.text.tokenizer import load_tokenizer

    model = transformers.AutoModel.from_pretrained(PATH, dtype=torch.float32).eval()
    tokenizer = load_tokenizer(PATH)
    with torch.no_grad():
        return {text: model(torch.tensor([tokenizer.encode(text).ids])).last_hidden_state[0] for text in TEXTS}


def unit(vector):
    return torch.nn.functional.normalize(vector, dim=-1).numpy()


@pytest.mark.parametrize("pooling", [None, "last", "mean"])
def test_vectors_are_those_of_transformers(client, served, expected, pooling):
    extra = {"pooling": pooling} if pooling else {}
    found = client.embeddings.create(model="adder", input=TEXTS, extra_body=extra)
    again = client.embeddings.create(model="adder", input=TEXTS[3], extra_body=extra)  # in the prefix cache
    for one, text in zip(found.data, TEXTS, strict=True):
        rows = expected[text]
        reference = unit(rows.mean(0) if pooling == "mean" else rows[-1])
        assert numpy.linalg.norm(one.embedding) == pytest.approx(1, abs=1e-5)
        assert numpy.dot(one.embedding, reference) > 0.999, text
    assert numpy.dot(again.data[0].embedding, found.data[3].embedding) > 0.9999
    assert found.usage.prompt_tokens == found.usage.total_tokens == sum(map(len, TEXTS))
    assert [one.index for one in found.data] == [0, 1, 2, 3] and found.object == "list"


def test_numbers_come_as_a_list_or_as_bytes_and_as_many_as_are_asked_for(client, served):
    import httpx

    ask = {"model": "adder", "input": [[3, 4], [5]]}
    floats = httpx.post(f"{served.url}/v1/embeddings", json=ask).json()["data"]
    coded = httpx.post(f"{served.url}/v1/embeddings", json={**ask, "encoding_format": "base64"}).json()["data"]
    for one, other in zip(floats, coded, strict=True):
        assert numpy.frombuffer(base64.b64decode(other["embedding"]), "<f4").tolist() == pytest.approx(one["embedding"])
    short = client.embeddings.create(**ask, dimensions=4)
    expected = numpy.array(floats[0]["embedding"][:4])
    assert short.data[0].embedding == pytest.approx(expected / numpy.linalg.norm(expected), abs=1e-6)


def test_a_program_gets_vectors_as_numbers(client, served):
    import asyncio

    from weft.serve.embeddings import unit_vector

    vector = unit_vector(asyncio.run(served.llm.embed("7+8=", pooling="mean")))
    found = client.embeddings.create(model="adder", input="7+8=", extra_body={"pooling": "mean"})
    assert numpy.dot(vector, found.data[0].embedding) > 0.999


def test_inputs_of_several_groups_come_in_order(client):
    many = client.embeddings.create(model="adder", input=["1+1="] * 300)
    assert len(many.data) == 300
    assert max(abs(numpy.subtract(many.data[0].embedding, many.data[299].embedding))) < 1e-2


def test_vectors_are_written_beside_the_loop_of_streams(client, served, monkeypatch):
    """JSON of a million numbers takes a second."""
    import threading

    from weft.serve import embeddings

    threads, vector = [], embeddings.unit_vector

    def written(*given):
        threads.append(threading.get_ident())
        return vector(*given)

    monkeypatch.setattr(embeddings, "unit_vector", written)
    assert len(client.embeddings.create(model="adder", input=TEXTS).data) == len(TEXTS) == len(threads)
    assert served.thread.ident not in threads


def test_inputs_are_submitted_as_few_at_a_time_as_the_server_holds():
    """More of them than it holds would be refused whenever they come."""
    import asyncio
    from types import SimpleNamespace

    from weft.serve import embeddings

    groups = []

    class Answer:
        def __init__(self, prompts):
            self.prompts = prompts

        async def arrivals(self):
            for index, prompt in enumerate(self.prompts):
                yield index, [SimpleNamespace(error=None, embedding=prompt.encode())]

        def usage(self):
            return {"prompt_tokens": len(self.prompts)}

    async def choices(asked, answer_id):
        groups.append(asked.prompts)
        return Answer(asked.prompts)

    service = SimpleNamespace(most_requests=2, choices=choices, end=lambda answer: None)
    asked = embeddings.AskedVectors.of({"input": ["1", "2", "3"]})
    assert asyncio.run(embeddings._vectors(service, asked, "last", "id")) == ([b"1", b"2", b"3"], 3)
    assert groups == [["1", "2"], ["3"]]


def test_what_is_wrong_is_refused_by_name(served):
    import httpx

    wrong = [
        ({}, "input", "input is missing"),
        ({"input": []}, "input", "input=[] is empty"),
        ({"input": ["1", ""]}, "input", "is empty; send at least one token"),
        ({"input": ["1", 2]}, "input", "input[1]=2 is not a string or a list of token ids"),
        ({"input": "1", "encoding_format": "hex"}, "encoding_format", "encoding_format='hex' is not"),
        ({"input": "1", "dimensions": 0}, "dimensions", "dimensions=0 is not a positive integer"),
        ({"input": "1", "dimensions": 10**6}, "dimensions", "dimensions=1000000 is more than the model's"),
        ({"input": "1", "pooling": "cls"}, "pooling", "pooling='cls' is not"),
        ({"input": "1", "cache_salt": ""}, "cache_salt", "cache_salt='' is not a non-empty string"),
        ({"input": "1", "normalize": False}, "normalize", "normalize=False is not supported"),
        ({"input": "1", "x": 1}, "x", "x is not a field of this request"),
        ({"input": "1" * 200}, None, "200 tokens and leaves no room"),
        ({"input": "1", "model": "x"}, "model", "model 'x' is not served"),
    ]
    for body, param, message in wrong:
        answer = httpx.post(f"{served.url}/v1/embeddings", json=body)
        error = answer.json()["error"]
        assert answer.status_code in (400, 404) and message in error["message"], (body, error)
        assert error["param"] == param, (body, error)


def test_the_checkpoint_says_how_its_vectors_are_made(tmp_path):
    from weft.serve.checks import BadField
    from weft.serve.embeddings import pooling_of

    assert pooling_of(None) == pooling_of(tmp_path) == "last"
    (tmp_path / "1_Pooling").mkdir()
    file = tmp_path / "1_Pooling" / "config.json"
    for name, pooling in (("pooling_mode_mean_tokens", "mean"), ("pooling_mode_lasttoken", "last")):
        file.write_text(json.dumps({"word_embedding_dimension": 8, name: True, "pooling_mode_cls_token": False}))
        assert pooling_of(tmp_path) == pooling
    file.write_text(json.dumps({"pooling_mode_cls_token": True}))
    with pytest.raises(BadField, match="the checkpoint asks for pooling_mode_cls_token; send pooling, last or mean"):
        pooling_of(tmp_path)
