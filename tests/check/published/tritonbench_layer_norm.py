"""Driver of tritonbench's operators/layer_norm/tutorial.py: Triton's tutorial of 2025, backward pass."""

import torch
from stubs import folder, package

# The lock is given back by one thread, before the others' stores are known to have been made.
LOCK = [(r"    tl\.atomic_xchg\(Lock, 0\)", "    tl.debug_barrier()\n\\g<0>")]
package(
    "tritonbench.operators.layer_norm",
    folder() / "tritonbench/tritonbench/operators/layer_norm",
    mend={"tutorial.py": LOCK},
)
from tritonbench.operators.layer_norm.tutorial import LayerNorm  # noqa: E402

torch.manual_seed(0)
inputs = [torch.randn(*shape, device="cuda", requires_grad=True) for shape in ((300, 64), (64,), (64,))]
theirs = [x.detach().clone().requires_grad_() for x in inputs]
out = LayerNorm.apply(inputs[0], (64,), *inputs[1:], 1e-5)
expected = torch.nn.functional.layer_norm(theirs[0], (64,), *theirs[1:])
for y in (out, expected):
    y.backward(torch.ones_like(y))
for x, y in zip([out, *(x.grad for x in inputs)], [expected, *(x.grad for x in theirs)], strict=True):
    torch.testing.assert_close(x, y, atol=1e-3, rtol=1e-3)
