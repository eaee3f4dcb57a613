"""add_adapters: all cases, planted bugs that they find, refused arguments, and code for all targets."""

import importlib

import pytest
import torch

import weft
from tests.compiling import SHARED, TARGETS, compiled, stack_bytes
from tests.ops.checking import run_cases
from tests.ops.layer_cases import DEVICES, check_refused, everywhere, mutated
from weft import ops
from weft.ops.case import Draw
from weft.runtime.capabilities import Capabilities, launch_options

module = importlib.import_module("weft.ops.gemm.add_adapters")
CASES = list(module.ADD_ADAPTERS.cases())


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_case(case):
    weft.simulate(run_cases, 1, args=([case], 1))


@pytest.mark.parametrize("device", DEVICES)
def test_rows_without_an_adapter_keep_their_bits(device):
    def check(device):
        y, x = (torch.randn(20, n, device=device, dtype=torch.bfloat16) for n in (48, 32))
        A, B = (torch.randn(shape, device=device, dtype=torch.bfloat16) for shape in ((2, 16, 32), (2, 48, 16)))
        adapters = torch.full((20,), -1, dtype=torch.int32, device=device)
        adapters[3] = 1
        added = y.clone()
        ops.add_adapters(added, x, A, B, torch.ones(2, device=device), [48], adapters)
        assert torch.equal(added[:3], y[:3]) and torch.equal(added[4:], y[4:]) and not torch.equal(added[3], y[3])

    everywhere(check, device)


def test_a_row_of_a_batch_gets_the_bits_that_it_gets_alone():
    """Which adapters its neighbours have, and how many rows there are, changes nothing up to a tile's size."""

    def main(team):
        [case] = [case for case in CASES if case.sizes[0] == 5 and case.dtype == torch.bfloat16]
        y, x, *rest, adapters = module.ADD_ADAPTERS.inputs(case, 0, Draw(case, 0))
        alone = y.clone()
        ops.add_adapters(y, x, *rest, module._ends(case), adapters)
        for row in range(len(y)):
            here = slice(row, row + 1)
            ops.add_adapters(alone[here], x[here], *rest, module._ends(case), adapters[here])
        return torch.equal(alone, y)

    assert weft.simulate(main, 1) == [True]


def test_scales_may_be_strided():
    def main(team):
        [case] = [case for case in CASES if case.sizes[0] == 5 and case.dtype == torch.bfloat16]
        y, *rest, scale, adapters = module.ADD_ADAPTERS.inputs(case, 0, Draw(case, 0))
        strided = torch.stack((scale, scale + 1), dim=1)[:, 0]
        for one, out in ((scale, y), (strided, other := y.clone())):
            ops.add_adapters(out, *rest, one, module._ends(case), adapters)
        return torch.equal(y, other)

    assert weft.simulate(main, 1) == [True]


# What the cases must see.
MUTANTS = {
    "another adapter": ("A + (number * WIDTH + column)", "A + column"),
    "the first part": ("part * RANK + place", "place"),
    "no scale": ("* factor", "* 1.0"),
    "a tile's other rows": ("mask=chosen[:, None] & inside[None, :]", "mask=(row < T)[:, None] & inside[None, :]"),
    "one split": ("for split in range(splits)", "for split in range(1)"),
    "columns after a part": ("((column >= low) & (column < high))[None, :]", "(column < N)[None, :]"),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_the_cases_find_a_planted_bug(name, tmp_path):
    mutant = mutated(module, *MUTANTS[name], f"add_adapters_mutant_{len(name)}", tmp_path)

    def main(team):
        worst = 0.0
        for case in CASES:
            if case.sizes[0] == 0 or case.sizes[0] > 20:
                continue
            y, *rest, adapters = inputs = module.ADD_ADAPTERS.inputs(case, 0, Draw(case, 0))
            expected = module.ADD_ADAPTERS.reference(case, 0, [inputs])
            mutant.AddAdapters().forward(module.AdapterArguments(y, *rest, module._ends(case), adapters))
            worst = max(worst, ((y.double() - expected).abs().mean() / expected.abs().mean()).item())
        return worst

    [worst] = weft.simulate(main, 1)
    assert worst > 0.05


def arguments(**changes):
    f = torch.zeros
    given = {"y": f(4, 40), "x": f(4, 8), "A": f(2, 32, 8), "B": f(2, 40, 16), "scale": f(2), "ends": [24, 40]}
    given["adapters"] = torch.zeros(4, dtype=torch.int32)
    return {**given, **changes}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"y": torch.zeros(4, 40).double()}, "y.dtype=torch.float64 is not one of float16, bfloat16, float32"),
        ({"x": torch.zeros(4, 8).half()}, "x.dtype=torch.float16 is not one of float32"),
        ({"x": torch.zeros(3, 8)}, "x has shape (3, 8); it must be (4, K)"),
        (
            {"y": torch.zeros(40, 4).t()},
            "y has strides (1, 4); its rows must be contiguous, since it is written in place",
        ),
        ({"B": torch.zeros(2, 40, 8)}, "B has rank 8; pad it with zeros to one of 16, 32, 64"),
        ({"B": torch.zeros(2, 39, 16)}, "B has shape (2, 39, 16); it must be (adapters, 40, R)"),
        ({"A": torch.zeros(2, 16, 8)}, "A has shape (2, 16, 8); it must be (2, 32, 8)"),
        ({"scale": torch.zeros(3)}, "scale has shape (3,); it must be (2,)"),
        ({"adapters": torch.zeros(4, dtype=torch.int64)}, "adapters.dtype=torch.int64 is not one of int32"),
        ({"ends": [24, 39]}, "ends=[24, 39] do not ascend to N=40; pass the end of each of up to 3 matrices"),
        ({"ends": [40, 40]}, "ends=[40, 40] do not ascend"),
        ({"ends": []}, "ends=[] do not ascend"),
        ({"ends": [1, 2, 3, 40]}, "do not ascend to N=40; pass the end of each of up to 3"),
        ({"y": torch.zeros(40).expand(4, 40)}, "y has strides (0, 1); its rows must be contiguous"),
        ({"x": torch.zeros(4, 0), "A": torch.zeros(2, 32, 0)}, "x has shape (4, 0); pass 1 or more columns"),
        (
            {
                "A": torch.zeros(1).expand(1 << 22, 32, 32),
                "x": torch.zeros(4, 32),
                "B": torch.zeros(1).expand(1 << 22, 40, 16),
                "scale": torch.zeros(1 << 22),
            },
            "A has 4294967296 elements, more than 2147483648; pass a part of the adapters in each of several calls",
        ),
    ],
)
def test_wrong_arguments_are_refused(changes, message):
    check_refused(ops.add_adapters, tuple(arguments(**changes).values()), message)


def built(name, arch, dtype, rank):
    x, fp32, numbers = torch.zeros(16, dtype=dtype), torch.zeros(16), torch.zeros(16, dtype=torch.int32)
    caps = Capabilities(device_name=arch, arch=arch, sms=132, memory_bytes=0, peer_access=(True,))
    options = {"WIDTH": 3 * rank, "RANK": rank, "num_warps": 4, **launch_options(caps)}
    if name == "shrink":
        given = x, 4096, numbers, x, fp32, 64, 4096, 4, 512
        constexprs = {"ROWS": 64, "BLOCK_K": module.block_k(dtype)}
        return compiled(module.shrink_adapters_kernel, *given, arch=arch, **constexprs, **options)
    given = x, 6144, numbers, x, fp32, fp32, 64, 6144, 4, 8, 4096, 5120
    return compiled(module.expand_adapters_kernel, *given, arch=arch, ROWS=64, BLOCK=module.COLUMNS, **options)


@pytest.mark.triton_internals
@pytest.mark.parametrize("name", ["shrink", "expand"])
@pytest.mark.parametrize("arch", TARGETS)
def test_compiles_and_fits(arch, name, tmp_path):
    for dtype, rank in ((torch.bfloat16, 16), (torch.float32, 64)):
        kernel = built(name, arch, dtype, rank)
        assert kernel.metadata.shared <= SHARED[arch], dtype
        if arch == "sm_90":
            ptx = kernel.asm["ptx"]
            assert "ld.global" not in ptx[: ptx.index("griddepcontrol.wait")]
            assert stack_bytes(kernel, tmp_path) == 0
