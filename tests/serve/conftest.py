"""The built-in model with a chat template, served on virtual ranks at a free port of this machine."""

import asyncio
import shutil
import threading
import time
from contextlib import contextmanager
from types import SimpleNamespace

import pytest

import weft
from tests.limits import ANSWER
from weft.models.builtin import PATH


@pytest.fixture(scope="session")
def directory(tmp_path_factory):
    """Its checkpoint. A conversation's text is its messages' contents; a system message is refused."""
    directory = tmp_path_factory.mktemp("serve") / "adder"
    shutil.copytree(PATH, directory)
    (directory / "chat_template.jinja").write_text(
        "{% for message in messages %}{% if message.role == 'system' %}{{ raise_exception('no system messages') }}"
        "{% endif %}{{ message.content }}{% endfor %}{{ suffix }}"
    )
    return directory


@contextmanager
def serving(directory, world_size=2, max_batch=4, **options):
    """A running server: its `url`, `service`, `llm` and `thread`."""
    from weft.serve import address, app, server

    llm = weft.AsyncLLM(
        directory, world_size, device="sim", mode="reference", max_batch=max_batch, page_size=16, warm_up=True
    )
    service = app.Service(llm, app.ServeOptions(model_name="adder", **options))
    with address.bound("127.0.0.1", 0) as at:
        listening = threading.Event()
        running = server.Server(service, listening.set)
        thread = threading.Thread(target=lambda: asyncio.run(running.serve(sockets=[at])), daemon=True)
        thread.start()
        assert listening.wait(timeout=ANSWER) and running.started
        try:
            yield SimpleNamespace(url=address.url(at), service=service, llm=llm, thread=thread, server=running)
        finally:
            running.should_exit = True
            thread.join(timeout=ANSWER)
            llm.close()
            assert not thread.is_alive()


def until(true, seconds=ANSWER):
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.002)


@pytest.fixture(scope="module")
def served(directory):
    with serving(directory, max_body_bytes=1 << 16) as served:
        yield served


@pytest.fixture(scope="module")
def client(served):
    import openai

    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="any", max_retries=0) as client:
        yield client
