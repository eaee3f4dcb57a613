"""NVSHMEM's device functions in programs on torch's symmetric memory, as torch's module of them declares them."""

import textwrap

import pytest

import weft
from weft.check.torch_programs.program import TorchProgram

HEAD = """
    import torch
    import torch.distributed as dist
    import torch.distributed._symmetric_memory as symm_mem
    import torch.distributed._symmetric_memory._nvshmem_triton as nvshmem
    import triton
    import triton.language as tl
    from torch.distributed._symmetric_memory._nvshmem_triton import requires_nvshmem

    N = 12

    def start(rank, size):
        torch.cuda.set_device(rank)
        dist.init_process_group("nccl", rank=rank, world_size=size)
        symm_mem.set_backend("NVSHMEM")

    def symmetric(*shape, dtype=torch.float32, value=0):
        x = symm_mem.empty(*shape, dtype=dtype, device="cuda").fill_(value)
        symm_mem.rendezvous(x, dist.group.WORLD)
        return x
"""


@pytest.fixture
def report(tmp_path):
    def run(text, size=2, schedules=6):
        (file := tmp_path / "program.py").write_text(textwrap.dedent(HEAD) + textwrap.dedent(text))
        return weft.check(TorchProgram(file, "main"), size, schedules=schedules)

    return run


def kinds(report):
    return sorted({found.finding.kind for found in report.wrong})


RING = """
    @requires_nvshmem
    @triton.jit
    def ring(dst, src, signal, out, n, CALL):
        '''dst[n] at the next rank = src[n].        grid: (1,)'''
        next = (nvshmem.my_pe() + 1) % nvshmem.n_pes()
        SEND
        nvshmem.signal_wait_until(signal, 5, CALL)
        at = tl.arange(0, 16)
        tl.store(out + at, tl.load(dst + at, mask=at < n), mask=at < n)
        nvshmem.barrier_all()

    def main(rank, size):
        start(rank, size)
        dst, src, signal = symmetric(N), symmetric(N, value=rank), symmetric(1, dtype=torch.int64)
        dist.barrier()
        for call in (2, 4):
            out = torch.empty(N, device="cuda")
            ring[(1,)](dst, src, signal, out, N, call)
            assert (out == (rank - 1) % size).all(), out
"""
SIGNAL = "nvshmem.signal_op(signal.to(tl.int64), CALL.to(tl.int64), 9, next)"
ADD = "nvshmem.signal_op(signal.to(tl.int64), tl.full((), 2, tl.int64), 10, next)"
SENDS = {
    "put with signal": ("nvshmem.putmem_signal_block(dst, src, n * 4, signal, CALL, 9, next)", []),
    "fence": (f"nvshmem.put(dst, src, n, next); nvshmem.fence(); {SIGNAL}", []),
    "add": (f"nvshmem.put(dst, src, n, next); nvshmem.quiet(); {ADD}", []),
    "no fence": (f"nvshmem.put(dst, src, n, next); {SIGNAL}", ["relaxed-order"]),
}


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize(("send", "expected"), SENDS.values(), ids=list(SENDS))
def test_a_signal_orders_a_put_only_after_a_fence(report, size, send, expected):
    result = report(RING.replace("SEND", send), size)
    assert kinds(result) == expected, str(result)


def test_a_buffer_that_is_used_again_without_a_barrier_is_a_race(report):
    text = RING.replace("SEND", SENDS["put with signal"][0]).replace("nvshmem.barrier_all()", "pass")
    assert kinds(report(text)) == ["race"]


GETS = """
    @requires_nvshmem
    @triton.jit
    def fetch(dst, src, out, n):
        nvshmem.sync_all()
        nvshmem.GET(dst, src, n, (nvshmem.my_pe() + 1) % nvshmem.n_pes())
        QUIET
        at = tl.arange(0, 16)
        tl.store(out + at, tl.load(dst + at, mask=at < n), mask=at < n)
        nvshmem.barrier_all()

    def main(rank, size):
        start(rank, size)
        src = symmetric(N, dtype=torch.bfloat16, value=rank)
        dst, out = (torch.empty(N, dtype=torch.bfloat16, device="cuda") for _ in range(2))
        fetch[(1,)](dst, src, out, N)
        assert (out == (rank + 1) % size).all()
"""


@pytest.mark.parametrize(("get", "quiet"), [("get", "pass"), ("get_nbi", "nvshmem.quiet()")])
def test_gets_fetch_a_peer_s_memory(report, get, quiet):
    assert report(GETS.replace("GET", get).replace("QUIET", quiet), 3).ok


COLLECTIVES = """
    @requires_nvshmem
    @triton.jit
    def all_three(blocks, parts, whole, root, total, x, n):
        nvshmem.alltoall(0, parts, blocks, n)
        nvshmem.broadcast(0, root, x, n, 1)
        nvshmem.reduce(0, total, x, n, "sum")

    def main(rank, size):
        start(rank, size)
        blocks, parts = symmetric(size, N), symmetric(size, N)
        blocks += 10 * rank + torch.arange(size, device="cuda")[:, None]
        root, total, x = symmetric(N), symmetric(N), symmetric(N, value=rank + 1)
        all_three[(1,)](blocks, parts, blocks, root, total, x, N)
        assert (parts == 10 * torch.arange(size)[:, None] + rank).all()
        assert (root == 2).all() and (total == size * (size + 1) / 2).all()
"""


def test_collectives_of_device_code(report):
    result = report(COLLECTIVES, 3, schedules=3)
    assert result.ok, str(result)


BF16 = "x.to(tl.pointer_type(tl.bfloat16))"
BAD = [
    ("peer=7 is no rank of this team of 2", "nvshmem.put(x, x, n, tl.full((), 7, tl.int32))"),
    (
        "is not symmetric memory of this rank; allocate it by symm_mem.empty",
        "nvshmem.put(local, x, n, nvshmem.my_pe())",
    ),
    ("sig_op=3 is not simulated; pass 9 to set or 10 to add", SIGNAL.replace("9, next", "3, 0").replace("CALL", "n")),
    ("a wait with cmp=4 is not simulated", "nvshmem.signal_wait_until(signal, 4, n)"),
    ("team=1 of NVSHMEM is not simulated; pass 0", "nvshmem.alltoall(1, x, x, n)"),
    ("a reduction of NVSHMEM in bfloat16", f"nvshmem.reduce(0, {BF16}, {BF16}, n, 'sum')"),
]


@pytest.mark.parametrize(("message", "call"), BAD)
def test_mistakes_are_one_line(report, message, call):
    text = """
        @requires_nvshmem
        @triton.jit
        def wrong(x, local, signal, n):
            CALL

        def main(rank, size):
            start(rank, size)
            wrong[(1,)](symmetric(N), torch.empty(N, device="cuda"), symmetric(1, dtype=torch.int64), N)
    """
    assert message in str(report(text.replace("CALL", call), schedules=1))


def test_a_wait_without_a_signal_is_a_deadlock(report):
    assert kinds(report(RING.replace("SEND", "pass"), schedules=1)) == ["deadlock"]
