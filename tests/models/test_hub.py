"""Names of the Hugging Face hub: found in a cache that is laid out as the hub's own, without a connection to anywhere."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from huggingface_hub import constants
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

import weft
from tests.limits import PROCESS
from weft.cli import app
from weft.errors import CheckpointError
from weft.models.builtin import PATH as BUILTIN
from weft.models.hub import find_checkpoint, revision_of

NAME, OLD, NEW = "owner/adder-1.0", "a" * 40, "b" * 40
ROOT = Path(__file__).parents[2]


def add_snapshot(cache, commit, *refs, without=()):
    """Snapshot of the built-in model, whose weights are split into two files, as links to blobs."""
    repository = cache / f"models--{NAME.replace('/', '--')}"
    snapshot, blobs = repository / "snapshots" / commit, repository / "blobs"
    for folder in (snapshot, blobs, repository / "refs"):
        folder.mkdir(parents=True, exist_ok=True)
    tensors = list(load_file(BUILTIN / "model.safetensors").items())
    files = {path.name: path.read_bytes() for path in BUILTIN.iterdir() if path.name != "model.safetensors"}
    weight_map = {}
    for part in (0, 1):
        file = f"model-0000{part + 1}-of-00002.safetensors"
        save_file(dict(tensors[part::2]), blobs / "part")
        files[file] = (blobs / "part").read_bytes()
        weight_map |= {name: file for name, _ in tensors[part::2]}
    (blobs / "part").unlink()
    files["model.safetensors.index.json"] = json.dumps({"weight_map": weight_map}).encode()
    for name, content in files.items():
        (blobs / f"{commit[0]}-{name}").write_bytes(content)
        if name not in without:
            (snapshot / name).symlink_to(Path("..", "..", "blobs", f"{commit[0]}-{name}"))
    for ref in refs:
        (repository / "refs" / ref).write_text(commit)
    return snapshot


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """Cache of this process, which may not connect to anything but its own ranks."""

    def refuse(*arguments):
        raise AssertionError(f"a connection to {arguments[1:]}")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "hub"


def test_a_name_is_a_snapshot_of_the_cache(cache):
    snapshot, older = add_snapshot(cache, NEW, "main"), add_snapshot(cache, OLD, "v1")
    assert find_checkpoint(NAME) == find_checkpoint(f"{NAME}@main") == find_checkpoint(f"{NAME}@{NEW}") == snapshot
    assert find_checkpoint(f"{NAME}@v1") == find_checkpoint(f"{NAME}@{OLD}") == older
    assert (revision_of(snapshot), revision_of(BUILTIN)) == (NEW, None)


def test_a_path_is_taken_before_the_cache(cache, tmp_path):
    add_snapshot(cache, NEW, "main")
    (tmp_path / NAME).mkdir(parents=True)
    assert find_checkpoint(NAME) == Path(NAME)
    assert find_checkpoint(str(tmp_path)) == tmp_path


def test_a_cached_name_generates_on_virtual_ranks(cache):
    add_snapshot(cache, NEW, "main")
    with weft.LLM(NAME, 2, device="sim") as llm:
        assert llm.generate("123+456=")[0].text == "579"
    result = CliRunner().invoke(app, ["generate", "--device", "sim", "--world-size", "1", "--model", NAME])
    assert result.stdout.strip() == "123+456=579", result.output


def test_ranks_that_found_different_revisions_are_refused(cache):
    add_snapshot(cache, NEW, "main")
    add_snapshot(cache, OLD, "v1")

    def main(team):
        with pytest.raises(CheckpointError, match=f"rank 1 found revision {OLD}, rank 0 {NEW}; name it, as in OWNER/"):
            weft.Engine(NAME if team.rank == 0 else f"{NAME}@v1", team)
        return True

    assert weft.simulate(main, 2) == [True, True]


@pytest.mark.parametrize(
    ("name", "says"),
    [
        (
            "owner/other",
            "no such directory, and no revision main of it in {hub}; weft downloads nothing: type `hf download owner/other`",
        ),
        (
            f"{NAME}@v2",
            f"no such directory, and no revision v2 of it in {{hub}}; .*: type `hf download {NAME} --revision v2`",
        ),
        (f"{NAME}@{'c' * 40}", f"no revision {'c' * 40} of it in "),
        (f"{NAME}@../main", "no such directory; pass a directory with config.json and "),
        ("a--b/c", "no revision main of it in "),
        ("a b/c", "a b/c: no such directory; pass "),
        ("owner/a b", "no such directory; pass "),
        ("a/b/c", "no such directory; pass .*, or a name of the Hugging Face hub, such as Qwen/Qwen3-0.6B"),
        ("../x", r"\.\./x: no such directory; pass "),
        ("/owner/adder", "no such directory; pass "),
        ("nowhere/", "no such directory; pass "),
        (f"{NAME}@", "no such directory; pass "),
        ("multiplier", "no such directory; pass "),
        ("o/" + "x" * 5000, "no such directory; pass "),
        (Path(NAME), "no such directory; pass "),
        ("owner/file", "owner/file: is a file; pass a directory"),
        ("", "model='' names no directory"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_a_name_that_is_not_cached(cache, tmp_path, name, says):
    add_snapshot(cache, NEW, "main")
    (tmp_path / "owner").mkdir()
    (tmp_path / "owner" / "file").write_text("")
    with pytest.raises(CheckpointError, match=says.replace("{hub}", str(cache))) as refused:
        find_checkpoint(name)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "lacking", ["config.json", "model-00002-of-00002.safetensors", "model.safetensors.index.json", "tokenizer.json"]
)
@pytest.mark.parametrize("dangling", [False, True])
def test_a_part_of_a_download_is_refused(cache, lacking, dangling):
    snapshot = add_snapshot(cache, NEW, "main", without=() if dangling else (lacking,))
    if dangling:
        (cache / "models--owner--adder-1.0" / "blobs" / f"b-{lacking}").unlink()
    elif lacking == "tokenizer.json":
        assert find_checkpoint(NAME) == snapshot  # token ids need none
        return
    with pytest.raises(CheckpointError) as refused:
        find_checkpoint(NAME)
    assert str(refused.value).startswith(f"model='{NAME}': {snapshot} lacks ") and lacking in str(refused.value)
    assert str(refused.value).endswith(f"; type `hf download {NAME}`")


def test_a_listing_of_the_hub_names_what_a_download_lacks(cache, monkeypatch):
    snapshot = add_snapshot(cache, NEW, "main", without=("generation_config.json",))
    monkeypatch.setattr(
        "huggingface_hub._snapshot_download.read_tree_cache", lambda *where: {"generation_config.json": 1}
    )
    with pytest.raises(CheckpointError, match=f"{snapshot} is not complete; weft downloads nothing: type `hf download"):
        find_checkpoint(NAME)
    # Files that weft does not read may be left out.
    monkeypatch.setattr(
        "huggingface_hub._snapshot_download.read_tree_cache", lambda *where: {"consolidated.safetensors": 1}
    )
    assert find_checkpoint(NAME) == snapshot


@pytest.mark.parametrize("variable", ["HF_HOME", pytest.param("HF_HUB_CACHE", marks=pytest.mark.sweep)])
def test_a_process_finds_the_cache_by_the_hub_s_variables_and_connects_to_nothing(tmp_path, variable):
    hub = tmp_path / "hub"
    snapshot = add_snapshot(hub, NEW, "main")
    script = (
        "import socket, sys\n"
        "def refuse(*arguments): raise SystemExit(f'a connection to {arguments[1:]}')\n"
        "socket.socket.connect = socket.getaddrinfo = refuse\n"
        "from weft.models.hub import find_checkpoint\n"
        f"print(find_checkpoint({NAME!r}))\n"
        "find_checkpoint('owner/other')\n"
    )
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGINGFACE_"))}
    environment |= {"HF_ENDPOINT": "http://127.0.0.1:9", "PYTHONPATH": str(ROOT)}
    environment[variable] = str(tmp_path if variable == "HF_HOME" else hub)
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env=environment, timeout=PROCESS
    )
    assert done.stdout.strip() == str(snapshot), done.stderr
    assert done.stderr.strip().endswith(
        f"no revision main of it in {hub}; weft downloads nothing: type `hf download owner/other`"
    )


def test_the_command_line_says_what_to_type(cache):
    result = CliRunner().invoke(app, ["generate", "--device", "sim", "--model", "Qwen/Qwen3-0.6B"])
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == (
        f"weft: model='Qwen/Qwen3-0.6B': no such directory, and no revision main of it in {cache}; weft downloads nothing: "
        f"type `hf download Qwen/Qwen3-0.6B`\n"
    )
