"""Checkpoints may not contain names that leave their directory, or files whose reading may block."""

import json
import os
import signal
import socket

import pytest
import torch
from safetensors.torch import save_file

from weft.errors import CheckpointError
from weft.models import Checkpoint
from weft.parallel.sharding import Shard
from weft.text.chat import ChatTemplate
from weft.text.tokenizer import load_tokenizer

INDEX = "model.safetensors.index.json"


@pytest.fixture
def directory(tmp_path):
    path = tmp_path / "model"
    path.mkdir()
    (path / "config.json").write_text("{}")
    return path


@pytest.fixture(autouse=True)
def in_time():
    """A test that hangs is ended, and fails."""

    def late(*_):
        raise AssertionError("it hangs")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(20)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def loaded(directory):
    target = torch.zeros(2)
    Checkpoint(directory).load({"x": Shard(target=target, shape=(2,))})
    return target.tolist()


def index_of(directory, name):
    (directory / INDEX).write_text(json.dumps({"weight_map": {"x": name}}))


@pytest.mark.parametrize(
    "name", ["../outside.safetensors", "{absolute}", "sub/../../outside.safetensors", "", ".", "a\0b"]
)
def test_an_index_that_names_files_elsewhere_is_refused(directory, tmp_path, name):
    outside = tmp_path / "outside.safetensors"
    save_file({"x": torch.ones(2)}, outside)
    index_of(directory, name.format(absolute=outside))
    with pytest.raises(CheckpointError, match="index.json names '.*', which is not in this directory") as caught:
        loaded(directory)
    assert "\n" not in str(caught.value)


def test_links_and_folders_inside_are_read_as_a_hub_cache_has_them(directory, tmp_path):
    save_file({"x": torch.ones(2)}, tmp_path / "blob")
    (directory / "sub").mkdir()
    for name in ("a.safetensors", "sub/a.safetensors"):
        (directory / name).symlink_to(tmp_path / "blob")
        index_of(directory, name)
        assert loaded(directory) == [1.0, 1.0]
    (directory / "config.json").rename(tmp_path / "config")
    (directory / "config.json").symlink_to("../config")
    assert Checkpoint(directory).config == {}


def fifo(path):
    os.mkfifo(path)


def device(path):
    path.symlink_to("/dev/zero")


def folder(path):
    path.mkdir()


def unix_socket(path):
    with socket.socket(socket.AF_UNIX) as made:
        here = os.getcwd()
        os.chdir(path.parent)  # a socket's address is short
        try:
            made.bind(path.name)
        finally:
            os.chdir(here)


READERS = {
    "config.json": lambda directory: Checkpoint(directory),
    "generation_config.json": lambda directory: Checkpoint(directory).eos_token_ids(),
    INDEX: loaded,
    "model.safetensors": loaded,
    "tokenizer.json": load_tokenizer,
    "tokenizer_config.json": ChatTemplate,
    "chat_template.jinja": ChatTemplate,
}


@pytest.mark.parametrize(
    ("make", "kind"), [(fifo, "FIFO"), (device, "device"), (folder, "directory"), (unix_socket, "socket")]
)
@pytest.mark.parametrize("name", READERS)
def test_what_is_no_file_is_refused_before_it_hangs(directory, name, make, kind):
    (directory / name).unlink(missing_ok=True)
    make(directory / name)
    with pytest.raises(CheckpointError, match=f"{name}: is a {kind}, not a file") as caught:
        READERS[name](directory)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", INDEX, "chat_template.jinja"])
def test_a_file_of_a_gigabyte_is_refused_before_it_is_read(directory, name):
    with open(directory / name, "wb") as file:
        file.truncate(1 << 30)
    with pytest.raises(
        CheckpointError, match=f"{name}: has 1,073,741,824 bytes, more than the 268,435,456 that weft reads"
    ):
        READERS[name](directory)


def test_a_file_of_the_index_that_is_a_fifo_is_refused(directory):
    os.mkfifo(directory / "a.safetensors")
    index_of(directory, "a.safetensors")
    with pytest.raises(CheckpointError, match="a.safetensors: is a FIFO, not a file"):
        loaded(directory)


def test_a_file_that_becomes_a_fifo_after_the_first_look_is_refused_too(directory, monkeypatch):
    path = directory / "config.json"
    path.unlink()
    os.mkfifo(path)
    monkeypatch.setattr("weft.models.files.check_regular", lambda path: None)
    with pytest.raises(CheckpointError, match="is a FIFO"):
        Checkpoint(directory)
