"""torchrun's coordinates, switches for vLLM, SGLang and DeepGEMM, an API key, settings of torch.

The only file of weft that reads or sets environment variables.
"""

from __future__ import annotations

import glob
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

# Without it torch's symmetric memory refuses several ranks on one GPU.
_SHARED = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"
# The ranks that launch starts are on one machine, so their sockets listen on loopback. NCCL's service for ncclras is off: it
# answers every user of the machine.
_LOOPBACK = {"NCCL_SOCKET_IFNAME": "=lo", "GLOO_SOCKET_IFNAME": "lo", "NCCL_RAS_ENABLE": "0"}
# Variables that would have NCCL listen elsewhere in spite of that.
_ELSEWHERE = ("NCCL_COMM_ID", "NCCL_SOCKET_FAMILY", "NCCL_OOB_NET_ENABLE", "NCCL_OOB_NET_IFNAME")


@dataclass(frozen=True, slots=True, kw_only=True)
class Coordinates:
    """Rank of this process, as torchrun has assigned it.

    node_size  ranks of this machine; None: not said
    """

    rank: int
    world_size: int
    local_rank: int
    node_size: int | None = None


def coordinates() -> Coordinates | None:
    """torchrun's coordinates of this process; None if torchrun did not start it."""
    env = os.environ
    if not {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR"} <= env.keys():
        return None
    return Coordinates(
        rank=int(env["RANK"]),
        world_size=int(env["WORLD_SIZE"]),
        local_rank=int(env["LOCAL_RANK"]),
        node_size=int(env["LOCAL_WORLD_SIZE"]) if "LOCAL_WORLD_SIZE" in env else None,
    )


def visible_gpus() -> int:
    """Number of GPUs that this process sees, by files and CUDA_VISIBLE_DEVICES: torch need not be loaded."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        return len([one for one in chosen.split(",") if one.strip() not in ("", "-1")])
    return len(glob.glob("/dev/nvidia[0-9]*"))


def vllm_is_asked_for() -> bool:
    """True with WEFT_VLLM=1: vLLM starts its plugins by itself, so a program has no other way to say it."""
    return os.environ.get("WEFT_VLLM", "0") == "1"


def sglang_is_asked_for() -> bool:
    """True with WEFT_SGLANG=1, as ``vllm_is_asked_for``."""
    return os.environ.get("WEFT_SGLANG", "0") == "1"


def wanted_deep_gemm() -> bool | None:
    """WEFT_DEEP_GEMM: True with 1, False with 0, None without; ValueError with anything else.

    Which library multiplies is the process's choice, not a call's.
    """
    said = os.environ.get("WEFT_DEEP_GEMM")
    if said not in (None, "0", "1"):
        raise ValueError(
            f"WEFT_DEEP_GEMM={said!r} is neither 1 (DeepGEMM multiplies) nor 0 (cuBLAS does); without it DeepGEMM does where "
            f"it is installed"
        )
    return None if said is None else said == "1"


def api_key() -> str | None:
    """WEFT_API_KEY: unlike an argument, other users of the machine cannot read it. None if it is not set."""
    return os.environ.get("WEFT_API_KEY")


def allow_shared_gpus() -> None:
    """Let several ranks of this machine share a GPU."""
    os.environ[_SHARED] = "1"


def stand_for_machine(number: int) -> None:
    """Have NCCL take processes of different numbers for ones of different machines: sockets between them."""
    os.environ.update(NCCL_HOSTID=f"machine{number}", NCCL_NET="Socket")


def keep_sockets_local() -> None:
    """Keep sockets of NCCL and gloo on loopback, for ranks of one machine."""
    os.environ.update(_LOOPBACK)
    for name in _ELSEWHERE:
        os.environ.pop(name, None)


@contextmanager
def replaced(variables: dict[str, str]) -> Iterator[None]:
    """Scope with these environment variables, to which it adds what the environment has at its end."""
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        variables.clear()
        variables.update({name: value for name, value in os.environ.items() if before.get(name) != value})
        for name in [name for name in os.environ if name not in before]:
            del os.environ[name]
        os.environ.update(before)
