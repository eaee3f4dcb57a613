"""Programs on torch's symmetric memory on virtual ranks: devices, streams, groups, handles, processes."""

import random
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import weft
from tests.check import torch_examples
from tests.check.test_command import app
from weft.check.torch_programs import processes
from weft.check.torch_programs.program import TorchProgram


@pytest.fixture
def report(tmp_path):
    """Function that checks a program's text, of ranks that call ``main(rank, size)``."""

    def run(text, size=2, schedules=4, function="main"):
        file = tmp_path / "program.py"
        head = """
            import os, random
            import torch
            import torch.distributed as dist
            import torch.distributed._symmetric_memory as symm_mem
            import triton
            import triton.language as tl
        """
        file.write_text(textwrap.dedent(head) + textwrap.dedent(text))
        return weft.check(TorchProgram(file, function), size, schedules=schedules)

    return run


def kinds(report):
    return sorted({found.finding.kind for found in report.wrong})


@pytest.mark.parametrize(
    ("function", "expected"), [(None, []), ("no_release", ["relaxed-order"]), ("no_acquire", ["relaxed-order"])]
)
def test_a_program_runs_as_it_stands(function, expected):
    flags = ["--function", function] if function else []
    result = CliRunner().invoke(
        app, [torch_examples.__file__, "--torch", "--world-size", "2,4", "--schedules", "3", *flags]
    )
    assert result.exit_code == bool(expected), result.output
    assert f"{len(expected)} finding(s)" in result.output and all(f"1. {kind}" in result.output for kind in expected)
    if expected:
        assert "remedy: release with sem='release'" in result.output and "--torch --function" in result.output


def test_what_single_threads_acquire_needs_a_cta_barrier(tmp_path):
    text = Path(torch_examples.__file__).read_text()
    head, last, tail = text.partition("    tl.debug_barrier()\n\n\n@triton.jit\ndef all_reduce")
    assert last
    file = tmp_path / "program.py"
    file.write_text(head + last.partition("\n")[2] + tail)
    report = weft.check(TorchProgram(file, "run"), 2, schedules=4)
    assert kinds(report) == ["missing-barrier"] and "single threads acquire signal pad #1" in str(report), str(report)


def test_arguments_are_for_programs():
    result = CliRunner().invoke(app, [torch_examples.__file__, "--args", "5"])
    assert result.exit_code == 2 and "add --torch" in result.output


def test_torch_is_as_before_afterwards():
    state, python = torch.get_rng_state(), random.getstate()
    weft.check(TorchProgram(Path(torch_examples.__file__), "run"), 2, schedules=1)
    assert not torch.cuda.is_available() and not torch.distributed.is_initialized()
    assert torch.equal(torch.get_rng_state(), state) and random.getstate() == python
    assert torch.zeros(1).device.type == "cpu"


def test_each_rank_is_a_process(report):
    text = """
        KEPT = {}

        def main(rank, size):
            assert os.environ["RANK"] == str(rank) and os.environ["LOCAL_WORLD_SIZE"] == str(size)
            KEPT[0] = rank
            torch.manual_seed(rank)
            first = torch.rand(1).item()
            dist.init_process_group("nccl")
            os.environ["MINE"] = str(rank)
            other = [None] * size
            dist.all_gather_object(other, first)
            assert KEPT == {0: rank} and os.environ["MINE"] == str(rank)
            assert len(set(other)) == size
            torch.manual_seed(rank)
            assert torch.rand(1).item() == first
            return torch.rand(4), random.random()
    """
    found = report(text, 3)
    assert found.ok, str(found)


def test_each_rank_and_run_has_modules_of_folders_without_init(report, tmp_path):
    for name in ("outer/inner/kept.py", "outer/inner/deeper/kept.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("RANKS = []\n")
    text = """
        from outer.inner import kept
        import outer.inner.deeper.kept as deeper

        def main(rank, size):
            dist.init_process_group("nccl", rank=rank, world_size=size)
            for module in (kept, deeper):
                module.RANKS.append(rank)
                dist.barrier()
                assert module.RANKS == [rank]
    """
    found = report(text, 2, 3)
    assert found.ok and not any(name.startswith("outer") for name in sys.modules), str(found)


def test_a_module_that_waits_for_ranks_while_it_is_imported_is_refused(report, tmp_path):
    """Python would have the next rank that imports it wait for this rank's thread, without end."""
    (tmp_path / "comm.py").write_text(
        "import torch.distributed as dist\ndist.init_process_group('nccl')\ndist.barrier()\nRANK = dist.get_rank()\n"
    )
    text = """
        import comm

        def main(rank, size):
            assert comm.RANK == rank
    """
    assert report(text, 1, 1).ok
    assert "module comm waits for other ranks or a kernel while it is imported; move the call" in str(
        report(text, 2, 1)
    )


def test_weft_s_modules_are_of_all_ranks(report, monkeypatch):
    text = """
        import sys

        def main(rank, size):
            dist.init_process_group("nccl", rank=rank, world_size=size)
            import weft.check.sarif
            dist.barrier()
            kept = [None] * size
            dist.all_gather_object(kept, id(sys.modules["weft.check.sarif"]))
            assert len(set(kept)) == 1
    """
    monkeypatch.delitem(sys.modules, "weft.check.sarif", raising=False)
    found = report(text, 2, 1)
    assert found.ok and "weft.check.sarif" in sys.modules, str(found)


def test_objects_of_other_ranks_are_copies(report):
    text = """
        class Info:
            def __init__(self, rank):
                self.rank, self.x = rank, torch.full((2,), float(rank), device="cuda")

        def main(rank, size):
            dist.init_process_group("nccl", rank=rank, world_size=size)
            gathered, mine, sent = [None] * size, Info(rank), [Info(rank), "x"]
            dist.all_gather_object(gathered, mine)
            dist.broadcast_object_list(sent, 1)
            mine.rank = mine.x[0] = 9
            dist.barrier()
            assert all(type(info) is Info and info.x.tolist() == [float(info.rank)] * 2 for info in gathered)
            assert [info.rank for info in gathered] == list(range(size)) and sent[0].rank == 1 and type(sent[0]) is Info
    """
    found = report(text, 3, 2)
    assert found.ok, str(found)


def test_classes_for_gpus_may_be_named(report):
    text = """
        from typing import Optional
        from torch.distributed._symmetric_memory import _SymmetricMemory

        def of(graph: torch.cuda.CUDAGraph | None = None, handle: _SymmetricMemory | None = None,
               stream: torch.cuda.Stream | None = None, same: Optional[_SymmetricMemory] = None) -> None:
            pass

        def main(rank, size):
            dist.init_process_group("nccl", rank=rank, world_size=size)
            handle = symm_mem.rendezvous(symm_mem.empty(4, device="cuda"), dist.group.WORLD)
            assert isinstance(handle, _SymmetricMemory) and not isinstance(3, (_SymmetricMemory, torch.cuda.CUDAGraph))
            torch.cuda.nvtx.mark("begin")
            with torch.cuda.nvtx.range("step {}", rank):
                of(handle=handle)
    """
    found = report(text, 2, 1)
    assert found.ok, str(found)


def test_tensors_are_of_the_gpu(report):
    text = """
        def main(rank, size):
            x = torch.zeros(4, device="cuda")
            assert x.device == torch.device("cuda", rank) and x.is_cuda and not x.is_cpu and x.get_device() == rank
            y = torch.ones(4).cuda(non_blocking=True).to(x.device, torch.float16) + torch.empty_like(x).fill_(1).half()
            assert y.cpu().tolist() == [2.0] * 4 and torch.cuda.device_count() == size
            assert torch.cuda.get_device_capability(x.device) == (9, 0)
            with torch.device("cuda"):
                assert torch.ones(2).sum() == 2
            torch.set_default_device("cuda")
            assert torch.ones(2).is_cuda
            assert torch.cuda.get_device_properties(0).multi_processor_count > 0
            torch.cuda.synchronize()
            torch.accelerator.synchronize()
    """
    found = report(text)
    assert found.ok, str(found)


def test_collectives_are_in_the_order_of_ranks(report):
    text = """
        def main(rank, size):
            dist.init_process_group("nccl", rank=rank, world_size=size)
            x = torch.arange(size, dtype=torch.float32) + rank
            dist.all_reduce(x)
            assert x[0] == sum(range(size))
            parts = [torch.empty(2) for _ in range(size)]
            dist.all_gather(parts, torch.full((2,), float(rank)))
            assert [p[0].item() for p in parts] == list(range(size))
            whole = torch.empty(2 * size)
            dist.all_gather_into_tensor(whole, torch.full((2,), float(rank)))
            assert whole[-1] == size - 1
            piece = torch.empty(1)
            dist.reduce_scatter_tensor(piece, torch.ones(size))
            assert piece == size
            y = torch.full((1,), float(rank))
            dist.broadcast(y, 1)
            assert y == 1
            pair = dist.new_group([0, 1])
            if rank < 2:
                dist.all_reduce(y, group=pair)
                assert y == 2 and dist.get_rank(pair) == rank and dist.get_world_size(pair) == 2
            assert type(dist.group.WORLD) is dist.ProcessGroup and isinstance(dist.group.WORLD, dist.ProcessGroup)
            dist.barrier()
    """
    found = report(text, 3)
    assert found.ok, str(found)


COPY = """
    @triton.jit
    def double(x, out, N: tl.constexpr):
        at = tl.arange(0, N)
        tl.store(out + at, 2 * tl.load(x + at))

    def main(rank, size):
        dist.init_process_group("nccl", rank=rank, world_size=size)
        shard = symm_mem.empty(16, device="cuda").fill_(rank + 1.0)
        handle = symm_mem.rendezvous(shard, dist.group.WORLD)
        here, out = torch.zeros(16, device="cuda"), torch.empty(16, device="cuda")
        main_stream, side = torch.cuda.current_stream(), torch.cuda.Stream()
        handle.barrier()
        {fork}
        with torch.cuda.stream(side):
            here.copy_(handle.get_buffer((rank + 1) % size, (16,), torch.float32))
            done = side.record_event()
        {join}
        double[(1,)](here, out, 16)
        handle.barrier()
        torch.cuda.synchronize()
        return out
"""


@pytest.mark.parametrize(
    ("fork", "join", "expected"),
    [
        ("side.wait_stream(main_stream)", "main_stream.wait_stream(side)", []),
        ("side.wait_event(main_stream.record_event())", "main_stream.wait_event(done)", []),
        ("side.wait_stream(main_stream)", "done.synchronize()", []),
        ("pass", "main_stream.wait_stream(side)", ["race"]),
        ("side.wait_stream(main_stream)", "pass", ["race"]),
    ],
)
def test_streams_and_events_order_copies(report, fork, join, expected):
    found = report(COPY.format(fork=fork, join=join))
    assert kinds(found) == expected, str(found)


def test_signals_of_the_host_order_streams(report):
    text = """
        def main(rank, size, signalled=True):
            dist.init_process_group("nccl", rank=rank, world_size=size)
            handle = symm_mem.rendezvous(symm_mem.empty(8, device="cuda"), dist.group.WORLD)
            handle.barrier()
            if rank == 0:
                handle.get_buffer(1, (8,), torch.float32).fill_(5)
                if signalled:
                    handle.put_signal(1)
            elif rank == 1:
                if signalled:
                    handle.wait_signal(0)
                assert not signalled or (handle.get_buffer(1, (8,), torch.float32) == 5).all()
            dist.barrier()
            own = symm_mem.empty(4, device="cuda").fill_(rank)
            dist.barrier()
            values = [x.tolist() for x in torch.ops.symm_mem.get_remote_tensors(own, dist.group.WORLD.group_name)]
            assert values == [[float(peer)] * 4 for peer in range(size)]
            dist.barrier()

        def unsignalled(rank, size):
            main(rank, size, False)
            handle = symm_mem.get_symm_mem_workspace(dist.group.WORLD.group_name, 64)
            if rank == 1:
                handle.wait_signal(0)
    """
    found = report(text)
    assert found.ok, str(found)
    found = report(text, function="unsignalled")
    assert kinds(found) == ["deadlock"] and "waits in wait_signal from rank 0" in str(found)
    assert "give the wait a time limit" in str(found)


def test_spawned_functions_are_the_ranks(report):
    text = """
        def rank_of(rank, size, extra):
            assert extra == "x" and dist.is_initialized() is False
            dist.init_process_group("nccl", rank=rank, world_size=size)
            dist.barrier()

        if __name__ == "__main__":
            torch.multiprocessing.spawn(rank_of, args=(2, "x"), nprocs=2)
    """
    found = report(text, function=None)
    assert found.ok, str(found)
    assert "pass --world-size 2" in str(report(text, 3, function=None))


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("torch.cuda.CUDAGraph()", "a CUDA graph is not simulated"),
        ("double[(1,)](x, x, 4)", "kernel double on a side stream is not simulated; launch it on the main stream"),
        ("x.mul_(2)", "Tensor.mul_ on a side stream, of memory that kernels or peers use is not simulated"),
        (
            "torch.ops.symm_mem.one_shot_all_reduce(x, 'sum', '0')",
            "torch.ops.symm_mem.one_shot_all_reduce is not simulated",
        ),
        ("symm_mem.rendezvous(torch.zeros(4), dist.group.WORLD)", "not of symm_mem.empty()"),
    ],
)
def test_what_is_not_simulated_is_named_with_its_line(report, line, says):
    stream = "torch.cuda.Stream()" if line.startswith(("double", "x.")) else "None"
    text = f"""
        @triton.jit
        def double(x, out, N: tl.constexpr):
            tl.store(out + tl.arange(0, N), 2 * tl.load(x + tl.arange(0, N)))

        def main(rank, size):
            dist.init_process_group("nccl", rank=rank, world_size=size)
            x = symm_mem.empty(4).fill_(0)
            with torch.cuda.stream({stream}):
                {line}
    """
    found = str(report(text))
    assert says in found and line in found


def test_words_that_are_their_own_signal(report):
    text = """
        @triton.jit
        def publish(x, peers, N: tl.constexpr, WORLD: tl.constexpr, RANK: tl.constexpr):
            at = tl.arange(0, N)
            for peer in tl.static_range(WORLD):
                to = tl.load(peers.to(tl.pointer_type(tl.uint64)) + peer).to(tl.pointer_type(tl.int32))
                tl.store(to + RANK * N + at, tl.load(x + at))

        @triton.jit
        def gather(peers, out, N: tl.constexpr, WORLD: tl.constexpr, RANK: tl.constexpr, CLEAR: tl.constexpr):
            at = tl.arange(0, N * WORLD)
            own = tl.load(peers.to(tl.pointer_type(tl.uint64)) + RANK).to(tl.pointer_type(tl.int32))
            x = tl.load(own + at, volatile=True)
            while tl.min(x) < 0:
                x = tl.load(own + at, volatile=True)
            tl.store(out + at, x)
            if CLEAR:
                tl.store(own + at, -1)

        def main(rank, size, calls=1):
            dist.init_process_group("nccl", rank=rank, world_size=size)
            box = symm_mem.empty(4 * size, dtype=torch.int32).fill_(-1)
            handle = symm_mem.rendezvous(box, dist.group.WORLD)
            handle.barrier()
            out = torch.empty(4 * size, dtype=torch.int32)
            for call in range(calls):
                publish[(1,)](torch.full((4,), rank, dtype=torch.int32), handle.buffer_ptrs_dev, 4, size, rank)
                gather[(1,)](handle.buffer_ptrs_dev, out, 4, size, rank, True)
                assert out[::4].tolist() == list(range(size))
            dist.barrier()

        def reused(rank, size):  # the next call's words may come before the clear
            main(rank, size, 2)
    """
    found = report(text)
    assert found.ok, str(found)
    assert "race" in kinds(report(text, function="reused"))


def test_a_backward_pass_and_triton_s_driver_are_of_the_gpu(report):
    text = """
        from triton.language.math import rsqrt as inverse_root
        from triton.testing import do_bench

        @triton.autotune([triton.Config({"N": size}) for size in (2, 4, 8)], key=["size"])
        @triton.jit
        def scale(x, out, size, N: tl.constexpr):
            tl.static_assert(N > 2)
            at = tl.program_id(0) * N + tl.arange(0, N)
            tl.store(out + at, inverse_root(tl.load(x + at, mask=at < size, other=1.0)), mask=at < size)

        class Scale(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                ctx.save_for_backward(x)
                out = torch.empty_like(x)
                scale[lambda meta: (triton.cdiv(6, meta["N"]),)](x, out, 6)
                return out

            @staticmethod
            def backward(ctx, grad):
                x, = ctx.saved_tensors
                assert grad.is_cuda and x.device.type == "cuda"
                out = torch.zeros(6, device="cuda")
                scale[(2,)](x, out, 6)
                return grad * torch.full((1,), -0.5, device="cuda") * out**3

        def main(rank, size):
            x = torch.tensor([1.0, 4.0, 16.0, 0.25, 64.0, 1.0], device="cuda", requires_grad=True)
            root = x.detach().clone().requires_grad_()
            for backward in (torch.Tensor.backward, lambda y: torch.autograd.grad(y, x)):
                y = Scale.apply(x)
                assert y.tolist() == root.rsqrt().tolist()
                backward(y.sum())
            root.rsqrt().sum().backward()
            torch.testing.assert_close(x.grad, root.grad)

            driver = triton.runtime.driver.active
            assert driver.get_current_target().arch == 90 and driver.get_active_torch_device() == x.device
            facts = driver.utils.get_device_properties(x.device.index)
            assert facts["multiprocessor_count"] == torch.cuda.get_device_properties(0).multi_processor_count
            calls = []
            assert len(do_bench(lambda: calls.append(1), quantiles=[0.5, 0.2])) == 2 and calls == [1]
            assert scale.best_config.kwargs == {"N": 4}
            assert do_bench(fn=lambda: None, warmup=1, rep=1, grad_to_none=[x], quantiles=[0.5]) > 0
            assert do_bench(lambda: None, 1, 1, None, None, "median") > 0 and do_bench(lambda: None, return_mode="all")
    """
    found = report(text)
    assert found.ok, str(found)


@pytest.mark.parametrize(("release", "expected"), [("release", []), ("relaxed", ["relaxed-order"])])
def test_a_stream_waits_for_and_writes_values(report, release, expected):
    text = f"""
        from cuda.bindings import driver
        from torch._C._distributed_c10d import _SymmetricMemory

        @triton.jit
        def fill(x, flag, value, N: tl.constexpr):
            tl.store(x + tl.arange(0, N), value)
            tl.debug_barrier()
            tl.atomic_xchg(flag, 1, sem="{release}", scope="sys")

        def main(rank, size):
            dist.init_process_group("nccl", rank=rank, world_size=size)
            inbox = _SymmetricMemory.empty_strided_p2p(
                size=(8,), stride=(1,), dtype=torch.float32, device=torch.device("cuda"), group_name="0"
            )
            handle = _SymmetricMemory.rendezvous(inbox)
            x, flags = torch.empty(8, device="cuda"), torch.zeros(2, dtype=torch.int32, device="cuda")
            side, at = torch.cuda.Stream(), flags.data_ptr()
            side.wait_stream(torch.cuda.current_stream())
            with side:
                equal = driver.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_EQ
                done, = driver.cuStreamWaitValue32(side.cuda_stream, at, 1, equal)
                assert done == driver.CUresult.CUDA_SUCCESS
                handle.get_remote_tensor((rank + 1) % size, (8,), torch.float32).copy_(x)
                driver.cuStreamWriteValue32(torch.cuda.current_stream().cuda_stream, at + 4, 5, 0)
            fill[(1,)](x, flags, rank, 8)
            torch.cuda.current_stream().wait_stream(side)
            handle.barrier()
            assert flags.tolist() == [1, 5] and inbox.tolist() == [(rank - 1) % size] * 8
    """
    found = report(text)
    assert kinds(found) == expected, str(found)
    assert ("cuLaunchKernel of cuda.bindings.driver is not simulated") in str(
        report("""
            from cuda.bindings import driver

            def main(rank, size):
                driver.cuLaunchKernel()
        """, 1, 1)
    )  # fmt: skip


@pytest.mark.parametrize("signal", [True, False])
def test_the_main_stream_writes_values(report, signal):
    text = f"""
        from cuda.bindings import driver

        def main(rank, size):
            dist.init_process_group("nccl", rank=rank, world_size=size)
            box = symm_mem.empty(4, dtype=torch.int32, device="cuda").fill_(0)
            inbox = symm_mem.empty(4, dtype=torch.int32, device="cuda").fill_(0)
            there = symm_mem.rendezvous(box, dist.group.WORLD).buffer_ptrs[1 - rank]
            handle = symm_mem.rendezvous(inbox, dist.group.WORLD)
            handle.barrier()
            handle.get_buffer(1 - rank, (4,), torch.int32).fill_(rank)
            stream, geq = torch.cuda.current_stream().cuda_stream, driver.CUstreamWaitValue_flags(0)
            if {signal}:
                with torch.cuda.stream(torch.cuda.Stream()):
                    driver.cuStreamWriteValue32(stream, there + 4, 5, 0)
                driver.cuStreamWaitValue32(stream, box.data_ptr() + 4, 5, geq)
            assert (inbox == 1 - rank).all() or not {signal}
            torch.ops.symm_mem.stream_write_value32_(box, 2, 7)
            assert box[2] == 7
            handle.barrier()
    """
    found = report(text)
    assert kinds(found) == ([] if signal else ["race"]), str(found)


@pytest.mark.parametrize("beta", ["0.0", "None"])
def test_what_reads_uninitialised_memory_is_wrong_in_every_run(report, beta):
    text = f"""
        @triton.jit
        def scaled(x, out, beta, N: tl.constexpr):
            at = tl.arange(0, N)
            y = tl.load(x + at)
            if beta is not None:
                y += beta * tl.load(out + at)
            tl.store(out + at, y)

        def main(rank, size):
            x = torch.arange(64.0, device="cuda")
            counts = torch.empty(4, dtype=torch.int32, device="cuda")
            assert counts.tolist() == [-1] * 4 and torch.empty(2, dtype=torch.bool).shape == (2,)
            out = torch.empty_like(x)
            scaled[(1,)](x, out, {beta}, 64)
            assert out.tolist() == list(range(64))
    """
    found = report(text, 1, 2)
    assert [one.count for one in found.wrong if one.finding.kind == "error"] == ([] if beta == "None" else [2])


def test_only_new_memory_of_plain_tensors_is_poisoned(report):
    text = """
        from torch._subclasses.fake_tensor import FakeTensorMode

        def main(rank, size):
            assert torch.empty(1 << 40, device="meta").is_meta
            with FakeTensorMode():
                assert torch.empty(1 << 20).shape == (1 << 20,)
            assert torch.empty(3, 3, layout=torch.sparse_coo).is_sparse
            torch.vmap(torch.empty_like)(torch.ones(2, 3))
            torch.func.functionalize(torch.empty_like)(torch.ones(2, 3))
            whole = torch.ones(8)
            assert torch.empty(4, out=whole[4:]).shape == (4,) and whole.tolist() == [1] * 8
            assert torch.empty(0).numel() == 0 and torch.empty_strided((2, 2), (4, 1)).isnan().all()
            large = torch.empty(1 << 26)
            assert large[0].isnan() and large[-1].isnan()
            with torch.cuda.stream(torch.cuda.Stream()):
                aside = torch.empty(4)
            assert aside.isnan().all()
    """
    found = report(text, 1, 1)
    assert found.ok, str(found)


def test_a_module_of_an_installed_package_acts_on_the_ranks_of_each_run(report, tmp_path, monkeypatch):
    """It is imported in the first run, and keeps what it has imported by name."""
    (tmp_path / "site").mkdir()
    (tmp_path / "site/installed_module.py").write_text(
        textwrap.dedent("""
        import torch
        from cuda.bindings import driver
        from cuda.bindings.driver import cuStreamWriteValue32
        from torch.cuda import Event, Stream, current_stream, is_available
        from torch.distributed import barrier, get_rank, group, init_process_group
        from torch.distributed._symmetric_memory import _SymmetricMemory, empty, rendezvous

        def start(rank, size):
            init_process_group("nccl", rank=rank, world_size=size)
            assert is_available() and get_rank() == rank == group.WORLD.rank()
            box = empty(4, dtype=torch.int32).fill_(0)
            handle = rendezvous(box, group.WORLD)
            barrier()
            there = handle.get_buffer((rank + 1) % size, (4,), box.dtype).data_ptr()
            with Stream() as side:
                side.wait_event(Event())
                assert current_stream() is side
                cuStreamWriteValue32(side.cuda_stream, there, 5, 0)
                driver.cuStreamWaitValue32(side.cuda_stream, box.data_ptr(), 5, 1)
            side.synchronize()
            assert box[0] == 5 and _SymmetricMemory.get_backend(box.device) == "CUDA"
            barrier()
    """)
    )
    monkeypatch.setattr(processes, "_INSTALLED", (*processes._INSTALLED, str(tmp_path / "site")))
    monkeypatch.syspath_prepend(tmp_path / "site")
    text = """
        import installed_module

        def main(rank, size):
            installed_module.start(rank, size)
    """
    found = report(text, 2, 2)
    module = sys.modules.pop("installed_module")
    assert found.ok, str(found)
    assert not module.is_available()
    with pytest.raises(RuntimeError, match="it works only there"):
        module.driver.cuStreamWaitValue32(0, 0, 0, 0)


@pytest.mark.parametrize(
    ("op", "expected"),
    [
        ("add.acc::f32", "torch.stack(parts).float().sum(0).bfloat16()"),
        ("add", "parts[0] + parts[1] + parts[2]"),
        ("max", "torch.stack(parts).amax(0)"),
    ],
)
def test_packed_values_are_reduced_over_a_multicast(report, op, expected):
    text = f"""
        @triton.jit
        def reduces(multicast, out, RANK: tl.constexpr, N: tl.constexpr):
            at = tl.arange(0, N)
            source, to = multicast.to(tl.pointer_type(tl.uint64)) + 2 * at, out.to(tl.pointer_type(tl.uint64)) + 2 * at
            w = tl.inline_asm_elementwise(
                "multimem.ld_reduce.relaxed.sys.global.{op}.v4.bf16x2 {{$0, $1, $2, $3}}, [$4];", "=r,=r,=r,=r,l",
                [source], dtype=(tl.uint32, tl.uint32, tl.uint32, tl.uint32), is_pure=False, pack=1,
            )
            tl.inline_asm_elementwise(
                "st.global.v4.b32 [$1], {{$2, $3, $4, $5}}; multimem.st.relaxed.sys.global.v4.bf16x2 [$6], {{$2, $3, $4, $5}};",
                "=r,l,r,r,r,r,l", [to, w[0], w[1], w[2], w[3], source + (RANK + 1) * 2 * N],
                dtype=tl.uint32, is_pure=False, pack=1,
            )

        def main(rank, size):
            dist.init_process_group("nccl", rank=rank, world_size=size)
            torch.manual_seed(0)
            parts = [torch.randn(256, dtype=torch.bfloat16) for _ in range(size)]
            box = symm_mem.empty((1 + size) * 256, dtype=torch.bfloat16, device="cuda")
            handle = symm_mem.rendezvous(box, dist.group.WORLD)
            box[:256] = parts[rank]
            handle.barrier()
            out = torch.empty(256, dtype=torch.bfloat16, device="cuda")
            reduces[(1,)](handle.multicast_ptr, out, rank, 32)
            handle.barrier()
            assert torch.equal(out, {expected}) and torch.equal(box[256:], out.repeat(size))
    """
    found = report(text, 3, 2)
    assert found.ok, str(found)


def test_a_custom_operator_has_the_functions_of_each_rank(report):
    text = """
        RANK = []

        @torch.library.custom_op("weft_tests::scaled", mutates_args=(), device_types="cuda")
        def scaled(x: torch.Tensor, by: float) -> torch.Tensor:
            return x * by + RANK[0]

        @scaled.register_fake
        def _(x, by):
            return torch.empty_like(x)

        def keep(ctx, inputs, output):
            ctx.by = inputs[1] + RANK[0]

        def back(ctx, grad):
            return grad * ctx.by + 10 * RANK[0], None

        scaled.register_autograd(back, setup_context=keep)

        def main(rank, size):
            dist.init_process_group("nccl", rank=rank, world_size=size)
            RANK.append(rank)
            dist.barrier()
            for call in (scaled, torch.ops.weft_tests.scaled):
                x = torch.ones(4, device="cuda", requires_grad=True)
                y = call(x, 3.0)
                dist.barrier()
                y.sum().backward()
                assert y.tolist() == [3.0 + rank] * 4 and x.grad.tolist() == [3.0 + 11 * rank] * 4
    """
    found = report(text, 3, 2)
    assert found.ok, str(found)


def test_a_kernel_for_gpus_takes_the_place_of_an_operator_s_other_kernels(report):
    text = """
        RANK = []

        def define(name, device_types, devices):
            @torch.library.custom_op(f"weft_tests::{name}", mutates_args=(), device_types=device_types)
            def op(x: torch.Tensor) -> torch.Tensor:
                return x - 1

            @op.register_kernel(devices)
            def of_gpus(x):
                return x + RANK[0]

            op.register_kernel("cpu", lambda x: x - 2)
            return op

        plain, of_cpu, of_both = (
            define(*args) for args in (("plain", None, "cuda"), ("of_cpu", "cpu", ("xpu", "cuda")), ("of_both", "cpu", None))
        )

        def main(rank, size):
            dist.init_process_group("nccl", rank=rank, world_size=size)
            RANK.append(rank)
            dist.barrier()
            for op in (plain, of_cpu, of_both, torch.ops.weft_tests.of_cpu):
                assert op(torch.zeros(2, device="cuda")).tolist() == [rank] * 2
    """
    found = report(text, 2, 2)
    assert found.ok, str(found)


@pytest.mark.parametrize("kind", ["DEF", "FRAGMENT"])
def test_operators_of_a_library_have_the_kernels_of_each_rank(report, kind):
    text = f"""
        RANK, lib = [], torch.library.Library("weft_tests_{kind}", "{kind}")
        lib.define("scaled(Tensor x, float by) -> Tensor")

        @torch.library.impl(lib, "scaled", "CUDA")
        def scaled(x, by):
            return x * by + RANK[0]

        torch.library.register_fake("weft_tests_{kind}::scaled", lambda x, by: torch.empty_like(x), lib=lib)
        torch.library.define("weft_tests_{kind}::shifted", "(Tensor x) -> Tensor")
        torch.library.impl("weft_tests_{kind}::shifted", "cuda", lambda x: x + RANK[0])

        def main(rank, size):
            dist.init_process_group("nccl", rank=rank, world_size=size)
            RANK.append(rank)
            dist.barrier()
            x = torch.ones(4, device="cuda")
            assert torch.ops.weft_tests_{kind}.scaled(x, 3.0).tolist() == [3.0 + rank] * 4
            assert torch.ops.weft_tests_{kind}.shifted(x).tolist() == [1.0 + rank] * 4
    """
    found = report(text, 3, 2)
    assert found.ok, str(found)
    assert not hasattr(torch.ops, f"weft_tests_{kind}") or not hasattr(
        getattr(torch.ops, f"weft_tests_{kind}"), "scaled"
    )


def test_an_operator_that_a_rank_defines_twice_is_refused(report):
    text = """
        lib = torch.library.Library("weft_tests_twice", "FRAGMENT")
        lib.define("same(Tensor x) -> Tensor")
        lib.define("same(Tensor x) -> Tensor")

        def main(rank, size):
            pass
    """
    assert "with the same name and overload name multiple times" in str(report(text, 1, 1))


def test_classes_and_functions_of_triton_may_have_another_name(report):
    """A program imports them while they are replaced, and Triton's front end compares some with its own."""
    text = """
        from triton.language import condition as holds, constexpr as constant, range as counted, static_range as unrolled
        from triton.language import max as largest, static_assert as certain, static_print as shown, zeros as nulls

        @triton.jit
        def fill(x, N: constant):
            certain(N > 1)
            shown("N", N)
            for i in unrolled(0, N):
                tl.store(x + i, i)
            for i in counted(0, N, num_stages=2):
                tl.store(x + N + i, i + largest(nulls((N,), tl.int32), 0))
            n = 0
            while holds(n < 3):
                n += 1
            tl.store(x, n)

        def main(rank, size):
            x = torch.zeros(8, dtype=torch.int32, device="cuda")
            fill[(1,)](x, 4)
            assert x.tolist() == [3, 1, 2, 3, 0, 1, 2, 3]
    """
    found = report(text, 1, 1)
    assert found.ok, str(found)


def test_an_assumption_that_does_not_hold_has_its_remedy(report):
    text = """
        @triton.jit
        def shifts(x, N: tl.constexpr):
            tl.assume(tl.program_id(0) > 0)
            tl.store(x + tl.program_id(0) * N + tl.arange(0, N), 1.0)

        def main(rank, size):
            shifts[(2,)](torch.empty(8, device="cuda"), 4)
    """
    found = str(report(text, 1, 1))
    assert "tl.assume(tl.program_id(0) > 0)" in found and "remedy: weaken the assumption" in found, found


BY = "{{.reg .pred p; .reg .u32 t; mov.u32 t, %tid.x; setp.{}.u32 p, t, {}; @p {};}}"


@pytest.mark.parametrize(
    ("fence", "threads", "expected"),
    [
        ("fence.acq_rel.gpu;", ">= 0", []),
        ("fence.acq_rel.gpu;", "< 2", []),
        ("fence.acq_rel.gpu;", "== 1", ["relaxed-order"]),
        (BY.format("eq", 0, "fence.acq_rel.gpu"), ">= 0", []),
        (BY.format("eq", 1, "fence.acq_rel.gpu"), ">= 0", ["relaxed-order"]),
        (BY.format("ne", 0, "membar.gl"), ">= 0", ["relaxed-order"]),
    ],
)
def test_a_fence_is_of_the_threads_that_execute_it(report, fence, threads, expected):
    text = f"""
        @triton.jit
        def thread():
            return tl.inline_asm_elementwise("mov.u32 $0, %tid.x;", "=r", [], dtype=tl.uint32, is_pure=True, pack=1)

        @triton.jit
        def passes(x, out, flag):
            if tl.program_id(0) == 0:
                tl.store(x + tl.arange(0, 128), 3.0)
                tl.debug_barrier()
                if thread() {threads}:
                    tl.inline_asm_elementwise("{fence}", "=r", [], dtype=tl.int32, is_pure=False, pack=1)
                tl.atomic_xchg(flag, 1, sem="relaxed")
            else:
                while tl.atomic_add(flag, 0, sem="acquire") == 0:
                    pass
                tl.debug_barrier()
                tl.store(out + tl.arange(0, 128), tl.load(x + tl.arange(0, 128)))

        def main(rank, size):
            x, out = torch.zeros(128, device="cuda"), torch.zeros(128, device="cuda")
            passes[(2,)](x, out, torch.zeros(1, dtype=torch.int32, device="cuda"))
    """
    assert kinds(report(text, 1)) == expected


@pytest.mark.parametrize(
    ("fence", "expected"),
    [
        ("fence.proxy.async.global;", []),
        ("fence.proxy.async.shared::cta;", ["proxy-fence"]),
        ("fence.proxy.alias;", ["proxy-fence"]),
        (BY.format("eq", 0, "fence.proxy.async"), []),
        (BY.format("ne", 0, "fence.proxy.async"), ["proxy-fence"]),
    ],
)
def test_a_proxy_fence_is_of_its_memory_and_threads(report, fence, expected):
    text = f"""
        from triton.tools.tensor_descriptor import TensorDescriptor

        @triton.jit
        def passes(x, box, out, flag):
            if tl.program_id(0) == 0:
                tl.store(x + tl.arange(0, 16), 3.0)
                tl.debug_barrier()
                tl.atomic_xchg(flag, 1, sem="release")
            else:
                while tl.atomic_add(flag, 0, sem="acquire") == 0:
                    pass
                tl.debug_barrier()
                tl.inline_asm_elementwise("{fence}", "=r", [], dtype=tl.int32, is_pure=False, pack=1)
                tl.store(out + tl.arange(0, 16)[None, :], box.load([0, 0]))

        def main(rank, size):
            x, out = torch.zeros(1, 16, device="cuda"), torch.zeros(16, device="cuda")
            flag = torch.zeros(1, dtype=torch.int32, device="cuda")
            passes[(2,)](x, TensorDescriptor.from_tensor(x, [1, 16]), out, flag)
    """
    assert kinds(report(text, 1)) == expected


WAIT_BY = "{{.reg .pred p; .reg .u32 t; mov.u32 t, %tid.x; setp.{}; @p cp.async.bulk.wait_group 0;}}"


@pytest.mark.parametrize(
    ("assembly", "expected"),
    [
        ("cp.async.bulk.wait_group 0;", []),
        ("cp.async.bulk.wait_group.read 0;", ["undrained-tma"]),
        ("cp.async.bulk.commit_group;", ["undrained-tma"]),
        (WAIT_BY.format("eq.u32 p, t, 0"), []),  # of the thread that Triton stores by
        (WAIT_BY.format("gt.u32 p, t, 0"), ["undrained-tma"]),
    ],
)
def test_a_wait_for_bulk_groups_completes_descriptor_stores(report, assembly, expected):
    text = f"""
        from triton.tools.tensor_descriptor import TensorDescriptor

        @triton.jit
        def pass_on(inbox, out, flag):
            if tl.program_id(0) == 0:
                inbox.store([0, 0], tl.full((1, 16), 3.0, tl.float32))
                tl.inline_asm_elementwise("{assembly}", "=r", [], dtype=tl.int32, is_pure=False, pack=1)
                tl.debug_barrier()
                tl.atomic_xchg(flag, 1, sem="release")
            else:
                while tl.atomic_add(flag, 0, sem="acquire") == 0:
                    pass
                tl.inline_asm_elementwise("fence.proxy.async;", "=r", [], dtype=tl.int32, is_pure=False, pack=1)
                tl.store(out + tl.arange(0, 16)[None, :], inbox.load([0, 0]))

        def main(rank, size):
            inbox, out = torch.zeros(1, 16, device="cuda"), torch.zeros(16, device="cuda")
            flag = torch.zeros(1, dtype=torch.int32, device="cuda")
            pass_on[(2,)](TensorDescriptor.from_tensor(inbox, [1, 16]), out, flag)
    """
    assert kinds(report(text, 1)) == expected


@pytest.mark.parametrize(
    ("wait", "barrier", "expected"),
    [
        ("cp.async.bulk.wait_group 0;", "pass", ["undrained-tma"]),  # thread 0's stores are in no other thread's groups
        ("cp.async.bulk.wait_group 0;", "tl.debug_barrier()", []),
        (WAIT_BY.format("eq.u32 p, t, 0"), "pass", ["undrained-tma"]),
        (WAIT_BY.format("eq.u32 p, t, 0"), "tl.debug_barrier()", []),
    ],
)
def test_other_threads_know_of_one_thread_s_wait_for_bulk_groups_after_a_barrier(report, wait, barrier, expected):
    text = f"""
        from triton.tools.tensor_descriptor import TensorDescriptor

        @triton.jit
        def reads_back(inbox, x, out):
            inbox.store([0, 0], tl.full((1, 16), 3.0, tl.float32))
            tl.inline_asm_elementwise("{wait}", "=r", [], dtype=tl.int32, is_pure=False, pack=1)
            {barrier}
            tl.store(out + tl.arange(0, 16), tl.load(x + tl.arange(0, 16)))

        def main(rank, size):
            inbox, out = torch.zeros(1, 16, device="cuda"), torch.zeros(16, device="cuda")
            reads_back[(1,)](TensorDescriptor.from_tensor(inbox, [1, 16]), inbox, out)
    """
    assert kinds(report(text, 1)) == expected
