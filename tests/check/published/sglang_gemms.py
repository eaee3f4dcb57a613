"""Driver of SGLang's kernels/ops/gemm/hc_mix.py and router_gemv.py, on each GPU for itself."""

import sys

import torch
from stubs import folder, package

OPS = folder() / "sglang/sglang/kernels/ops"
# Counters are added to by one thread, before the others' stores are known to have been made.
BARRIERS = {
    "hc_mix.py": [(r"    tl\.atomic_add\(counter_ptr, 1", "    tl.debug_barrier()\n\\g<0>")],
    "router_gemv.py": [(r"    count = tl\.atomic_add\(", "    tl.debug_barrier()\n\\g<0>")],
}
package("sglang.kernels.ops.gemm", OPS / "gemm", mend=BARRIERS)
package("sglang.kernels.ops.quantization", OPS / "quantization")
package("sglang.srt.utils", is_hip=lambda: False, is_gfx95_supported=lambda: False)


def hc_mix():
    from sglang.kernels.ops.gemm.hc_mix import fused_hc_mix

    rows, hc, hs, rank = 4, 2, 128, 32
    for _ in range(2):
        x, down = torch.randn(rows, hc * hs).bfloat16(), torch.randn(rank, hc * hs).bfloat16() / 16
        up = torch.randn(hc * hs, rank).bfloat16() / 6
        low = x.float() @ down.float().T / hc
        gate = torch.sigmoid((low * torch.sigmoid(low)).bfloat16().float() @ up.float().T)
        expected = (gate * x.float()).view(rows, hc, hs).sum(1) / hc
        torch.testing.assert_close(fused_hc_mix(x, down, up, hc, hs).float(), expected, atol=0.05, rtol=0.05)


def router_gemv():
    from sglang.kernels.ops.gemm.router_gemv import router_gemv

    for _ in range(2):
        x, w = torch.randn(2, 2048).bfloat16(), torch.randn(32, 2048)
        torch.testing.assert_close(router_gemv(x, w), x.float() @ w.T, atol=1e-2, rtol=1e-2)


torch.set_default_device("cuda")
torch.manual_seed(0)
{"hc_mix": hc_mix, "router_gemv": router_gemv}[sys.argv[2]]()
