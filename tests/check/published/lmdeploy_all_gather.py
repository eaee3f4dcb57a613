"""Driver of LMDeploy's kernels/cuda/symm_mem_allgather.py."""

import os

from gathers import check_all_gather
from stubs import folder, package

package("lmdeploy.pytorch.kernels.cuda", folder() / "lmdeploy/lmdeploy/pytorch/kernels/cuda")
from lmdeploy.pytorch.kernels.cuda.symm_mem_allgather import all_gather_inner, create_state  # noqa: E402


def main(rank, size):
    check_all_gather(create_state, all_gather_inner, rank, size)


if __name__ == "__main__":
    main(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
