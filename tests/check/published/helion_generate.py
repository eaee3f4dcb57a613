"""Generate helion's one-shot all-reduce as Triton code, without a GPU.

    python helion_generate.py FOLDER RANKS

It needs the package helion, and examples/distributed/all_reduce.py of its repository as FOLDER/helion/examples/all_reduce.py,
and writes FOLDER/helion/generated/wRANKS_rRANK.py: helion makes the rank a constant of the code.
"""

import argparse
import importlib.util
import sys
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
import torch.utils.cpp_extension
from torch.testing._internal.distributed.fake_pg import FakeStore


def main(folder, ranks):
    torch.utils.cpp_extension.load_inline = lambda *_, **__: SimpleNamespace(from_blob=None)  # CUDA code, not called
    spec = importlib.util.spec_from_file_location("all_reduce", folder / "examples/all_reduce.py")
    example = sys.modules["all_reduce"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    (folder / "generated").mkdir(exist_ok=True)
    kernel, group = example.one_shot_all_reduce_kernel, dist.group.WORLD.group_name
    for rank in range(ranks):
        bound = kernel.bind((torch.zeros(ranks, dtype=torch.int64), torch.zeros(16384), rank, group, ranks))
        (folder / f"generated/w{ranks}_r{rank}.py").write_text(bound.to_triton_code(kernel.configs[0]))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="of the fetched projects")
    parser.add_argument("ranks", type=int)
    options = parser.parse_args()
    main(options.folder / "helion", options.ranks)
