"""All the assembly for AMD GPUs: what stock Triton leaves out on CDNA3 (gfx942)."""

import triton
import triton.language as tl


@triton.jit
def complete_stores():
    """Every wave waits until its stores are in memory, those that its L2 holds included.

    A release by one thread waits for its own wave's stores, and a barrier brings waves together whose stores are still under
    way: for a barrier LLVM waits for the LDS only. Nor does Triton 3.6's compiler wait for the L2 (``buffer_wbl2``, and behind
    it the flag's store without ``s_waitcnt``); 3.9's does.
    """
    tl.inline_asm_elementwise(
        "s_waitcnt vmcnt(0)\n\tbuffer_wbl2 sc0 sc1\n\ts_waitcnt vmcnt(0)\n\tv_mov_b32 $0, 0",
        "=v", [], dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip
