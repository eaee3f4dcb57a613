"""Paths beside OpenAI's API answer in vLLM's forms: token ids of texts, their text, the version, the state."""

import json

import weft


def post(served, path, body, **options):
    import httpx

    headers = {"Content-Type": "application/json"}
    return httpx.post(served.url + path, content=json.dumps(body), headers=headers, **options)


def test_texts_and_conversations_become_token_ids_and_token_ids_text(served):
    ids = list(served.llm.tokenizer.encode("123+4=").ids)
    found = post(served, "/tokenize", {"model": "adder", "prompt": "123+4="}).json()
    assert found == {"count": 6, "max_model_len": 64, "tokens": ids, "token_strs": None}
    named = post(served, "/tokenize", {"prompt": "12", "return_token_strs": True, "add_special_tokens": False}).json()
    assert named["token_strs"] == ["1", "2"]
    chat = {"messages": [{"role": "user", "content": "123+"}], "chat_template_kwargs": {"suffix": "4="}}
    assert post(served, "/tokenize", {**chat, "add_generation_prompt": True}).json()["tokens"] == ids
    assert post(served, "/detokenize", {"tokens": ids}).json() == {"prompt": "123+4="}
    assert post(served, "/detokenize", {"tokens": []}).json() == {"prompt": ""}


def test_what_is_wrong_is_refused_by_name(served):
    wrong = [
        ("/tokenize", {}, "prompt", "prompt is missing; send it, or messages"),
        ("/tokenize", {"prompt": 5}, "prompt", "prompt=5 is not a string"),
        ("/tokenize", {"prompt": "\ud800"}, "prompt", "prompt is not text that UTF-8 can hold"),
        ("/tokenize", {"prompt": "x"}, None, "prompt='x' has 'x', which this model does not read"),
        ("/tokenize", {"prompt": "1", "add_special_tokens": 1}, "add_special_tokens", "is not True or False"),
        ("/tokenize", {"prompt": "1", "text": "1"}, "text", "text is not a field of this request; leave it out"),
        ("/tokenize", {"messages": []}, "messages", "messages=[] is not a list of messages"),
        (
            "/tokenize",
            {"messages": [{"role": "user", "content": "1"}], "continue_final_message": True},
            "continue_final_message",
            "continue_final_message=True is not supported; leave it out",
        ),
        ("/detokenize", {}, "tokens", "tokens=None is not a list of token ids"),
        ("/detokenize", {"tokens": "12"}, "tokens", "tokens='12' is not a list of token ids"),
        ("/detokenize", {"tokens": [True]}, "tokens", "tokens[0]=True is not a token id"),
        ("/detokenize", {"tokens": [1, -1]}, "tokens", "tokens[1]=-1 is a token id outside 0 .. "),
        ("/detokenize", {"tokens": [10**30]}, "tokens", "is a token id outside 0 .. "),
        ("/detokenize", {"tokens": [1], "model": "x"}, "model", "model 'x' is not served"),
    ]
    for path, body, param, message in wrong:
        answer = post(served, path, body)
        error = answer.json()["error"]
        assert answer.status_code in (400, 404) and message in error["message"], (body, error)
        assert error["param"] == param, (body, error)


def test_the_version_and_the_state_are_told_to_clients_of_vllm(served):
    import httpx

    assert httpx.get(f"{served.url}/version").json() == {"version": weft.__version__}
    for ask in (httpx.get, httpx.post):
        assert ask(f"{served.url}/ping").status_code == 200
    assert httpx.get(f"{served.url}/v1/models/adder").json()["id"] == "adder"
    assert httpx.get(f"{served.url}/v1/models/x").json()["error"]["code"] == "model_not_found"


def test_a_model_without_a_tokenizer_has_no_text_and_without_a_template_no_conversation(tmp_path):
    import asyncio
    from types import SimpleNamespace

    import httpx

    from weft.engine import Load
    from weft.serve import app, routes
    from weft.text.chat import ChatTemplate

    config = SimpleNamespace(lora=None)
    llm = SimpleNamespace(tokenizer=None, directory=None, error=None, load=Load(), max_seq_len=64, config=config)
    transport = httpx.ASGITransport(routes.create_app(app.Service(llm, app.ServeOptions(model_name="m", api_key="k"))))

    async def main():
        async with httpx.AsyncClient(transport=transport, base_url="http://weft") as http:
            key = {"Authorization": "Bearer k"}
            told = [await http.post("/detokenize", json={"tokens": [1]}, headers=key)]
            bare = tmp_path / "hidden"
            bare.mkdir()

            async def chat_prompt(messages, variables):
                return ChatTemplate(bare)

            llm.chat_prompt, llm.tokenizer = chat_prompt, object()
            told.append(
                await http.post("/tokenize", json={"messages": [{"role": "user", "content": "1"}]}, headers=key)
            )
            return [*told, await http.post("/tokenize", json={"prompt": "1"})]

    told, bare, keyless = asyncio.run(main())
    assert bare.status_code == 400 and "has no chat template" in bare.text and "hidden" not in bare.text
    assert told.status_code == 400 and "this model has no tokenizer" in told.json()["error"]["message"]
    assert keyless.status_code == 401
