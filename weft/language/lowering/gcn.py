"""All assembly for AMD GPUs: what stock Triton leaves out on CDNA3 (gfx942) and CDNA4 (gfx950)."""

import triton
import triton.language as tl


@triton.jit
def complete_stores():
    """Have every wave wait until its stores are in memory, also stores in its L2.

    A release by one thread waits for the stores of its wave only, and a barrier does not wait for stores: LLVM waits for
    the LDS there. Triton 3.6 does not wait for the L2 either (``buffer_wbl2``, then the flag's store without ``s_waitcnt``);
    Triton 3.9 does.
    """
    tl.inline_asm_elementwise(
        "s_waitcnt vmcnt(0)\n\tbuffer_wbl2 sc0 sc1\n\ts_waitcnt vmcnt(0)\n\tv_mov_b32 $0, 0",
        "=v", [], dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip
