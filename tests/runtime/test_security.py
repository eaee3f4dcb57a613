"""Sockets of ranks that launch starts, and refusal of messages that other programs wrote."""

import dataclasses
import os
import pickle
import secrets
import signal
import socket
import stat
import subprocess
import sys
import time
from pathlib import Path

import numpy
import pytest
import torch
import torch.distributed as dist

import weft
from tests.limits import PROCESS
from tests.runtime.sockets import listening
from weft.errors import ForeignMessage, PeerFailed
from weft.runtime import codec, launch, store
from weft.runtime.store import FolderStore, Given, given, private_folder
from weft.runtime.team.rendezvous import Rendezvous

LOOPBACK = {"127.0.0.1", "::1"}


class OnCPU:
    """A team without a GPU for `launch._worker`, with the real store, torch group and rendezvous."""

    def __init__(self, job, rank):
        os.environ.update(GLOO_SOCKET_IFNAME="eth0", NCCL_COMM_ID="0.0.0.0:1234")
        launch.connect("gloo", job.given, rank, job.world_size)
        self.rank = rank
        self.rendezvous = Rendezvous(FolderStore(given().folder), "team", rank, job.world_size, 60.0, given().secret)

    def fail(self, message):
        self.rendezvous.fail(message)

    def close(self):
        self.rendezvous.exchange("close", None)


def seen_by(team):
    x = torch.tensor([team.rank + 1.0])
    dist.all_reduce(x)
    folder = Path(given().folder)
    told = Path("/proc/self/cmdline").read_bytes() + Path("/proc/self/environ").read_bytes()
    return {
        "sum": x.item(),
        "met": team.rendezvous.exchange("met", team.rank),
        "listens": listening(),
        "mode": stat.S_IMODE(folder.stat().st_mode),
        "secret is told": any(form in told for form in (given().secret, given().secret.hex().encode())),
        "secret is in the store": any(given().secret in file.read_bytes() for file in folder.iterdir()),
        "folder": str(folder),
        "environment": {name: os.environ.get(name) for name in ("NCCL_SOCKET_IFNAME", "NCCL_COMM_ID")},
    }


def test_ranks_on_one_machine_listen_on_loopback_only_and_the_parent_nowhere():
    before = listening()
    with private_folder() as folder:
        job = launch._Job(Given(folder, secrets.token_bytes(32)), 2, 0, None, False)
        assert listening() == before
        ranks = launch._run(2, OnCPU, job, pickle.dumps((seen_by, ())))
    for rank in ranks:
        assert rank["sum"] == 3.0 and rank["met"] == [0, 1]
        assert rank["listens"] and set(rank["listens"]) <= LOOPBACK, rank["listens"]  # gloo's
        assert rank["mode"] == 0o700
        assert not rank["secret is told"] and not rank["secret is in the store"]
        assert rank["environment"] == {"NCCL_SOCKET_IFNAME": "=lo", "NCCL_COMM_ID": None}
        assert not os.path.exists(rank["folder"])


def seen_and_asleep(team, file):
    Path(file).with_suffix(f".{team.rank}").touch()
    time.sleep(600)


ORPHANS = """
import multiprocessing, os, pickle, secrets, signal, sys
from tests.runtime.test_security import OnCPU, seen_and_asleep
from weft.runtime import launch, store
from weft.runtime.store import Given, private_folder
def fork(*_):  # it has what the parent has of its ranks, and lives on until stdin ends
    if os.fork() == 0:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        print("forked", flush=True)
        sys.stdin.read()
        os._exit(0)
def collect(pipes, collected=launch._collect):
    print(*(process.pid for process in multiprocessing.active_children()), flush=True)
    return collected(pipes)
if __name__ == "__main__":
    signal.signal(signal.SIGUSR1, fork)
    launch._collect, store._MEMORY, store._LEAST_FREE = collect, sys.argv[2], 0
    with private_folder() as folder:
        job = launch._Job(Given(folder, secrets.token_bytes(32)), 2, 0, None, False)
        launch._run(2, OnCPU, job, pickle.dumps((seen_and_asleep, (sys.argv[1],))))
"""


@pytest.mark.parametrize("begun", [False, pytest.param(True, marks=pytest.mark.sweep)], ids=["starting", "running"])
def test_ranks_and_their_folder_are_gone_when_sigterm_comes_to_all_of_them(tmp_path, begun):
    """As systemd, `timeout` and Slurm send it. A fork of the parent that lives on keeps no rank."""
    script, file = tmp_path / "orphans.py", tmp_path / "rank"
    script.write_text(ORPHANS)
    (memory := tmp_path / "memory").mkdir()
    root = Path(weft.__file__).parent.parent
    parent = subprocess.Popen(
        [sys.executable, script, file, memory], env=os.environ | {"PYTHONPATH": str(root)}, start_new_session=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    try:
        ranks = parent.stdout.readline().decode().split()
        assert len(ranks) == 2 and len(list(memory.iterdir())) == 1
        told = [file.with_suffix(f".{rank}") for rank in range(2)] if begun else []
        wait_until(lambda: parent.poll() is not None or all(map(Path.exists, told)))
        os.kill(parent.pid, signal.SIGUSR1)
        assert parent.stdout.readline() == b"forked\n"
        os.killpg(parent.pid, signal.SIGTERM)
        assert parent.wait() == -signal.SIGTERM
        wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in ranks))
        assert not list(memory.iterdir())
    finally:
        parent.kill()
        parent.communicate()


def wait_until(done):
    deadline = time.monotonic() + PROCESS
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_folders_whose_owners_have_ended_are_removed_and_no_others(tmp_path, monkeypatch):
    monkeypatch.setattr(store, "_MEMORY", str(tmp_path))
    monkeypatch.setattr(store, "_LEAST_FREE", 0)
    (tmp_path / "weft-new").mkdir()  # its owner is about to lock it
    (tmp_path / "weft-file").touch()
    (elsewhere := tmp_path / "elsewhere").mkdir()
    (elsewhere / store._OWNED).touch()
    (tmp_path / "weft-link").symlink_to(elsewhere)
    with private_folder() as living:
        Path(living, "torch").touch()
        ended = os.fork()
        if ended == 0:
            with private_folder() as stale:
                Path(stale, "torch").touch()
                os._exit(0)
        os.waitpid(ended, 0)
        before = set(tmp_path.iterdir())
        with private_folder() as another:
            [stale] = before - set(tmp_path.iterdir())
            assert stale.name.startswith("weft-") and stale != Path(living)
            assert {Path(living, "torch"), elsewhere / store._OWNED} <= set(tmp_path.rglob("*"))
        assert os.path.exists(living) and not os.path.exists(another)
    assert {path.name for path in tmp_path.iterdir()} == {"weft-new", "weft-file", "weft-link", "elsewhere"}


def test_this_test_would_see_a_socket_on_all_interfaces():
    with socket.create_server(("0.0.0.0", 0)):
        assert "0.0.0.0" in listening()


class Attack:
    """Unpickled, it leaves a file."""

    def __init__(self, file):
        self.file = file

    def __reduce__(self):
        return os.system, (f"touch {self.file}",)


def stranger_writes(store, secret, key, data):
    """Error of rank 1 when another program has written as rank 0."""
    store.set(key, data)
    rendezvous = Rendezvous(store, "team.0-1.1", 1, 2, 5.0, secret)
    with pytest.raises(ForeignMessage) as caught:
        rendezvous.exchange("barrier", None)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("secret", [None, b"s" * 32], ids=["torchrun", "launch"])
def test_a_pickle_in_the_store_is_refused_and_runs_nothing(tmp_path, secret):
    ran = tmp_path / "ran"
    attack = pickle.dumps(("barrier", Attack(ran)))
    said = stranger_writes(dist.HashStore(), secret, "weft/team.0-1.1/1/0", attack)
    assert "rank 1: barrier (host call #1): the message under rank 0's key is refused" in said
    assert not ran.exists()
    pickle.loads(attack)  # it would have
    assert ran.exists()


def written_by(name, rank, count, secret):
    """The message of a rank in its ``count``-th call."""
    store = dist.HashStore()
    rendezvous = Rendezvous(store, name, rank, 2, 0.0, secret)
    rendezvous._count = count - 1
    with pytest.raises(weft.errors.PeerSilent):
        rendezvous.exchange("barrier", None)
    return store.get(f"weft/{name}/{count}/{rank}")


@pytest.mark.parametrize(
    ("name", "rank", "count", "secret"),
    [
        ("team.0-1.1", 0, 1, None),
        ("team.0-1.1", 0, 1, b"another" * 4),
        ("team.0-1.1", 1, 1, b"s" * 32),
        ("team.0-1.1", 0, 2, b"s" * 32),
        ("team.0-1.2", 0, 1, b"s" * 32),
    ],
    ids=["without", "of another run", "of another rank", "of another call", "of another team"],
)
def test_a_message_without_this_runs_secret_at_this_place_is_refused(name, rank, count, secret):
    message = written_by(name, rank, count, secret)
    said = stranger_writes(dist.HashStore(), b"s" * 32, "weft/team.0-1.1/1/0", message)
    assert "it does not carry this run's secret" in said


def test_a_well_formed_message_that_is_no_call_is_refused():
    said = stranger_writes(dist.HashStore(), None, "weft/team.0-1.1/1/0", codec.encode([1, 2]))
    assert "it is not the name of a call and an item" in said


def test_a_failure_is_shown_in_one_short_line_without_control_characters():
    store = dist.HashStore()
    store.set("weft/team/failed/0", b"\x1b[2J\xffred\r\n\x07" + b"x" * 10_000)
    with pytest.raises(PeerFailed) as caught:
        Rendezvous(store, "team", 1, 2).raise_if_a_peer_failed()
    assert str(caught.value).startswith(r"rank 1: rank 0 failed: \x1b[2J" + "\ufffd" + r"red\r\n\x07xxx")
    assert len(str(caught.value)) < 2100
    with pytest.raises(ForeignMessage, match="does not carry this run's secret"):
        Rendezvous(store, "team", 1, 2, secret=b"s").raise_if_a_peer_failed()
    Rendezvous(store, "team", 0, 2, secret=b"s").fail("CUDA error:\nfirst\nthen")
    with pytest.raises(PeerFailed, match="rank 0 failed: CUDA error: first then"):
        Rendezvous(store, "team", 1, 2, secret=b"s").raise_if_a_peer_failed()


def test_a_folder_of_messages_keeps_to_its_keys_and_follows_no_link(tmp_path):
    store = FolderStore(str(tmp_path))
    store.set("weft/../../x", b"1")
    assert store.check(["weft/../../x"]) and not store.check(["weft/../../x", "y"])
    [file] = tmp_path.iterdir()
    assert store.get("weft/../../x") == file.read_bytes() == b"1"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    store.delete_key("weft/../../x")
    assert not any(tmp_path.iterdir())
    target = tmp_path / "target"
    Path(store._path("k") + ".part").symlink_to(target)
    with pytest.raises(FileExistsError):
        store.set("k", b"1")
    assert not target.exists()


def test_virtual_ranks_refuse_what_processes_would():
    @dataclasses.dataclass
    class Mine:
        x: int

    with pytest.raises(weft.errors.NotExchangeable, match=r"item\[0\] is of type .*Mine, .* @weft.exchangeable"):
        weft.simulate(lambda team: team.exchange([Mine(1)]), 2)
    mine = weft.simulate(lambda team: team.exchange({"x": torch.full((2,), team.rank)}), 2)
    assert [[one["x"].tolist() for one in rank] for rank in mine] == [[[0, 0], [1, 1]]] * 2


def test_under_torchrun_a_result_that_cannot_travel_is_named(monkeypatch):
    told = []

    class Alone:
        rank, fail = 0, told.append

        def exchange(self, item):
            return [codec.decode(codec.encode(item))]

    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("weft.runtime.team.team.init_main", lambda **_: Alone())
    with pytest.raises(weft.errors.NotExchangeable) as caught:
        weft.launch(lambda team: {"loss": numpy.float32(1.0)})
    assert str(caught.value) == (
        "what main returned['loss'] is of type numpy.float32, and ranks exchange data only; pass x.item(), a plain Python value"
    )
    assert told == [f"NotExchangeable: {caught.value}"]
