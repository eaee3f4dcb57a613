"""An error of a rank ends running streams and the server."""

import pytest

import weft
from tests.serve.conftest import serving, until


def test_an_error_of_the_engine_ends_streams_and_the_server(directory, monkeypatch):
    import openai

    def fails(engine):
        raise RuntimeError("a GPU fell off")

    with (
        serving(directory) as served,
        openai.OpenAI(base_url=f"{served.url}/v1", api_key="any", max_retries=0) as client,
    ):
        stream = client.completions.create(
            model="adder", prompt="1+1=", max_tokens=60, stream=True, extra_body={"ignore_eos": True}
        )
        next(stream)
        monkeypatch.setattr(weft.Engine, "step", fails)
        with pytest.raises(openai.APIError, match="the engine has failed, and the server ends"):
            list(stream)
        until(lambda: not served.thread.is_alive())
    assert str(served.llm.error) == "a GPU fell off"
