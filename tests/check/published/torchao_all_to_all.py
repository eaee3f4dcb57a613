"""Driver of torchao's on-device all-to-all of mxfp8 rows."""

import os

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
from stubs import folder, package

KERNELS = "torchao.prototype.moe_training.kernels"
package("torchao.prototype.mx_formats.kernels", triton_mxfp8_dequant_dim0=None, triton_to_mxfp8_dim0=None)
package("torchao.prototype.mx_formats.mx_tensor", to_dtype=None, to_mx=None)
MEND = [
    # The first barrier acquires what the peers' kernels have written.
    ('sem="relaxed"\\)\n    sync_threads', 'sem="acq_rel")\n    sync_threads'),
    # A program copies its share of a peer's rows, and not all of them.
    (r"tl\.range\((num_input_\w*blocks)\)", r"tl.range(block_offset, \1, BLOCKS_PER_REMOTE_RANK)"),
]
FOLDER = folder() / "torchao" / KERNELS.replace(".", "/")
package(KERNELS, FOLDER)
package(f"{KERNELS}.mxfp8", FOLDER / "mxfp8", mend={"comms.py": MEND})  # without its __init__, which imports much
from torchao.prototype.moe_training.kernels.mxfp8.comms import _mxfp8_on_device_all_to_all_v  # noqa: E402

DIM, ROWS = 64, 3


def main(rank, size):
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", rank=rank, world_size=size)
    torch.set_default_device("cuda")
    # Rank r sends 1 + (r + p) % ROWS rows to rank p.
    splits = torch.tensor([[1 + (r + p) % ROWS for p in range(size)] for r in range(size)])
    capacity = ROWS * size
    x = symm_mem.empty(capacity, DIM, dtype=torch.float8_e4m3fn)
    scales = symm_mem.empty(capacity, DIM // 32, dtype=torch.uint8)
    sent = symm_mem.empty(size, dtype=torch.int64)
    generator = torch.Generator().manual_seed(0)
    for _ in range(2):
        rows = torch.randint(1, 100, (size, capacity, DIM), generator=generator, device="cpu").to(torch.uint8)
        marks = torch.randint(0, 255, (size, capacity, DIM // 32), generator=generator, device="cpu").to(torch.uint8)
        x.view(torch.uint8).copy_(rows[rank])
        scales.copy_(marks[rank])
        sent.copy_(splits[rank])
        out, out_scales = torch.zeros_like(x).view(torch.float8_e4m3fn), torch.zeros_like(scales)
        received = torch.empty_like(splits[0])
        _mxfp8_on_device_all_to_all_v(
            x, scales, sent, out, out_scales, received, dist.group.WORLD, BLOCKS_PER_REMOTE_RANK=2, BLOCK_SIZE=256
        )
        at = [splits[r, :rank].sum() for r in range(size)]
        parts = [slice(int(at[r]), int(at[r] + splits[r, rank])) for r in range(size)]
        expected = torch.cat([rows[r, parts[r]] for r in range(size)])
        assert torch.equal(received, splits[:, rank])
        assert torch.equal(out.view(torch.uint8)[: len(expected)], expected)
        assert torch.equal(out_scales[: len(expected)], torch.cat([marks[r, parts[r]] for r in range(size)]))
    dist.barrier()


if __name__ == "__main__":
    main(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
