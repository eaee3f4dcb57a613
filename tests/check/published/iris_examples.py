"""Driver of iris's examples 06 (message passing), 07, 08 and 09 (GEMMs); the heap is torch's symmetric memory."""

import importlib.util
import os
import sys

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
from stubs import folder, mended, package

IRIS, WHICH = folder() / "iris", sys.argv[2]
GEMMS = {
    "all_scatter": "07_gemm_all_scatter/gemm_all_scatter.py",
    "atomics": "08_gemm_atomics_all_reduce/gemm_atomics_all_reduce.py",
    "one_shot": "09_gemm_one_shot_all_reduce/gemm_one_shot_all_reduce.py",
}
# The first tiles have the numbers 0. Tiles are summed by atomics between GPUs; one is announced by one thread.
NUMBERS = [(r"tl\.assume\(pid_(.) > 0\)", "tl.assume(pid_\\1 >= 0)")]
MEND = {
    GEMMS["all_scatter"]: NUMBERS,
    GEMMS["atomics"]: [*NUMBERS, (r"c, mask=sub_mask\)", 'c, mask=sub_mask, scope="sys")'),
                       (r"heap_bases,(\s+)mask=sub_mask", 'heap_bases,\\1mask=sub_mask, scope="sys"')],
    GEMMS["one_shot"]: [*NUMBERS, (r"        # Signal to other ranks", "        tl.debug_barrier()\n\\g<0>")],
}  # fmt: skip
unused = dict.fromkeys((
    "set_device", "get_cu_count", "count_devices", "get_ipc_handle", "open_ipc_handle", "get_wall_clock_rate", "init_mpi",
    "mpi_allgather", "mpi_broadcast_scalar",
))  # fmt: skip
package("iris", IRIS / "iris")
package("iris._hip", **unused)
package("iris._mpi_helpers", world_barrier=dist.barrier, **unused)
package("examples.common.utils", read_realtime=None, is_triton_interpret_set=lambda: True)
import iris.iris as host  # noqa: E402


class Iris(host.Iris):
    def __init__(self, heap_size=1 << 18):
        self.cur_rank, self.num_ranks, self.device = dist.get_rank(), dist.get_world_size(), "cuda"
        self.heap_size, self.heap_offset, self.alignment = heap_size, 0, 1024
        self.memory_pool = symm_mem.empty(heap_size, dtype=torch.int8, device="cuda")
        addresses = symm_mem.rendezvous(self.memory_pool, dist.group.WORLD).buffer_ptrs
        self.heap_bases = torch.tensor(addresses, device="cuda").view(torch.uint64)


vars(sys.modules["iris"]).update({n: v for n, v in vars(host).items() if not n.startswith("_")}, iris=Iris)


def module(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    made = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


def main(rank, size):
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", rank=rank, world_size=size)
    if WHICH == "messages":
        example = module(IRIS / "examples/06_message_passing/message_passing_load_store.py")
        sys.argv = ["", "--buffer_size", "256", "--block_size", "64", "--heap_size", str(1 << 18)]
        example.main()
        return
    mend = MEND if "mended" in sys.argv else dict.fromkeys(GEMMS.values(), NUMBERS) if "numbers" in sys.argv else {}
    examples = mended(IRIS / "examples", mend)
    module(examples / GEMMS[WHICH])
    matmul = module((examples / GEMMS[WHICH]).parent / "matmul_wrapper.py").matmul
    matmul.set_debug(False)
    memory, n = Iris(), 64
    done = memory.zeros(4)
    for _ in range(2):
        torch.manual_seed(0 if WHICH == "all_scatter" else rank)
        a, b = torch.randn(n, n, device="cuda"), torch.randn(n, n * size, device="cuda")
        own = b.chunk(size, 1)[rank].contiguous()
        expected = a @ (b if WHICH == "all_scatter" else own)
        if WHICH != "all_scatter":
            dist.all_reduce(expected)
        c, out = memory.zeros(n, n, dtype=torch.float32), memory.zeros(expected.shape, dtype=torch.float32)
        memory.barrier()
        arguments = (a, own, c, out, None, None, None, done, rank, size, 4, 32, 32, 32, 1, True, 2, 4, 0, 16, 2)
        matmul.apply(*arguments, memory.heap_bases, 8)
        memory.barrier()
        torch.testing.assert_close(out, expected, atol=1e-3, rtol=1e-3)


if __name__ == "__main__":
    main(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
