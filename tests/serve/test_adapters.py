"""Requests name an adapter as their model; the list of models has it, and another name is refused."""

import asyncio
from types import SimpleNamespace

import httpx
import pytest

import weft
from tests.models.conftest import make_checkpoint  # noqa: F401
from tests.models.test_adapters import make_adapter
from weft.cli.serve import _adapters
from weft.engine import SamplingParams
from weft.serve import app, routes


@pytest.fixture
def llm(make_checkpoint, tmp_path):  # noqa: F811
    directory, model = make_checkpoint("Llama")
    make_adapter(tmp_path / "one", model, ["q_proj", "v_proj", "down_proj"], 4, 1)
    options = {"fused": False, "max_batch": 2, "page_size": 16, "max_seq_len": 32}
    llm = weft.AsyncLLM(directory, 1, device="sim", lora={"one": tmp_path / "one"}, **options)
    yield llm
    llm.close()


def test_a_request_names_its_adapter_as_the_model(llm):
    service = app.Service(llm, app.ServeOptions(model_name="base"))
    prompt, fields = list(range(1, 12)), {"max_tokens": 8, "ignore_eos": True, "return_token_ids": True}

    async def main():
        expected = {
            name: (await llm.generate(prompt, SamplingParams(max_tokens=8, ignore_eos=True, lora=lora))).token_ids
            for name, lora in (("base", None), ("one", "one"))
        }
        assert expected["base"] != expected["one"]
        transport = httpx.ASGITransport(routes.create_app(service))
        async with httpx.AsyncClient(transport=transport, base_url="http://weft/v1") as client:
            asked = [
                client.post("/completions", json={"prompt": prompt, "model": name, **fields})
                for name in ("base", "one", "base", "one")
            ]
            for answer, name in zip(await asyncio.gather(*asked), ("base", "one", "base", "one"), strict=True):
                content = answer.json()
                assert content["model"] == name
                assert content["choices"][0]["token_ids"] == expected[name]
            vectors = [
                (await client.post("/embeddings", json={"input": [prompt], "model": name})).json()
                for name in ("base", "one")
            ]
            assert vectors[0]["data"] != vectors[1]["data"] and vectors[1]["model"] == "one"
            models = (await client.get("/models")).json()["data"]
            assert [(one["id"], one.get("parent")) for one in models] == [("base", None), ("one", "base")]
            assert (await client.get("/models/one")).json()["id"] == "one"
            refused = await client.post("/completions", json={"prompt": prompt, "model": "two"})
            assert refused.status_code == 404
            assert refused.json()["error"]["message"] == "model 'two' is not served; served are: base, one"

    asyncio.run(main())


def test_an_adapter_needs_a_name_of_its_own():
    llm = SimpleNamespace(config=SimpleNamespace(lora={"base": "x"}))
    with pytest.raises(ValueError, match="the model and an adapter are both named 'base'; rename one"):
        app.Service(llm, app.ServeOptions(model_name="base"))


def test_words_of_the_flag():
    assert _adapters(["a=x", "b=y=z"]) == {"a": "x", "b": "y=z"}
    for words, message in (
        (["a"], "--lora 'a' is not NAME=DIR; pass a name, an equals sign and a directory"),
        (["=x"], "is not NAME=DIR"),
        (["a="], "is not NAME=DIR"),
        (["a=x", "a=y"], "--lora 'a=y' names an adapter a second time"),
    ):
        with pytest.raises(ValueError, match=message):
            _adapters(words)
