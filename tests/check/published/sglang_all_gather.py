"""Driver of SGLang's triton_symm_mem_ag.py."""

import os

from gathers import check_all_gather
from stubs import folder, package

package("sglang.srt.runtime_context", get_parallel=None, get_schedule=None, get_spec=None)
package("sglang.srt.distributed.device_communicators", folder() / "sglang/sglang/srt/distributed/device_communicators")
from sglang.srt.distributed.device_communicators.triton_symm_mem_ag import (  # noqa: E402
    all_gather_inner,
    create_state,
)


def main(rank, size):
    check_all_gather(create_state, all_gather_inner, rank, size)


if __name__ == "__main__":
    main(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
