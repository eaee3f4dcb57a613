"""Driver of FlashInfer's triton/sm_constraint_gemm.py with beta=0 and no C, on each GPU for itself."""

import torch
from stubs import folder, package

package("flashinfer", folder() / "flashinfer/flashinfer")
# C is read although beta is 0, and is uninitialised memory.
ZEROS = [(r"c = torch\.empty\(\(M, N\)", "c = torch.zeros((M, N)")]
package("flashinfer.triton", folder() / "flashinfer/flashinfer/triton", mend={"sm_constraint_gemm.py": ZEROS})
package("flashinfer.utils", GPUArchitectureError=RuntimeError, get_compute_capability=lambda _: (9, 0))
from flashinfer.triton.sm_constraint_gemm import gemm_persistent  # noqa: E402

torch.manual_seed(0)
a, b = torch.randn(128, 64, device="cuda").half(), torch.randn(64, 128, device="cuda").half()
torch.testing.assert_close(gemm_persistent(a, b, num_sms=4).float(), a.float() @ b.float(), atol=0.02, rtol=1e-3)
