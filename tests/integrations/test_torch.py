"""weft.integrations.torch on virtual ranks, against torch's own decomposed ops and styles."""

import itertools
import logging

import pytest
import torch
from torch import nn
from torch._inductor import config as inductor
from torch.distributed import _functional_collectives as functional
from torch.distributed import _symmetric_memory as symm_mem
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

from tests.integrations.virtual_groups import simulate_mesh  # noqa: F401
from weft import ops
from weft.integrations import torch as weft_torch
from weft.integrations.fallback import Fallback
from weft.integrations.torch import WeftColwiseParallel, WeftRowwiseParallel, install


@pytest.fixture(autouse=True)
def uninstall():
    yield
    weft_torch.uninstall()


def randn(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def decided(mesh):
    """The op of each kind of call, and True if it runs on weft."""
    return {(kind.op, bool(pays)) for kind, pays in Fallback.of(mesh)._pays.items()}


GATHERS = [  # shape of A, gather_dim, number of B, return_A
    ((4, 16), 0, 1, True),
    ((4, 16), 0, 1, False),
    ((4, 16), 0, 3, True),
    ((2, 3, 16), 0, 2, False),
    ((2, 3, 16), 1, 1, True),
]
SCATTERS = [((8, 16), 0, "sum"), ((4, 3, 16), 0, "avg"), ((2, 4, 16), 1, "sum")]


def test_a_sum_over_ranks_has_the_gradient_of_torch_s_collective_and_the_style_that_of_a_dtensor(simulate_mesh):  # noqa: F811
    """Losses that differ by rank, then one loss of all, whose gradients differ by a factor of W."""

    def main(mesh, team):
        x, weight = randn(6, 8, seed=team.rank), randn(5, 8, seed=10 + team.rank)
        losses = (lambda y: (y * randn(6, 5, seed=20 + team.rank)).sum(), lambda y: y.square().mean())
        sharded = [DTensor.from_local(operand, mesh, [Shard(1)]) for operand in (x, weight)]
        ways = {
            "op": (lambda a, b: ops.matmul_all_reduce(a, b, team), (x, weight)),
            "torch": (lambda a, b: functional.all_reduce(a @ b.t(), "sum", mesh), (x, weight)),
            "style": (lambda a, b: weft_torch._MatmulAllReduce.apply(a, b, team), (x, weight)),
            "DTensor": (lambda a, b: (a @ b.t()).redistribute(mesh, [Replicate()]).to_local(), sharded),
        }
        found = {}
        for name, (multiply, operands) in ways.items():
            for number, loss in enumerate(losses):
                leaves = [operand.detach().clone().requires_grad_() for operand in operands]
                grads = torch.autograd.grad(loss(multiply(*leaves)), leaves)
                found[name, number] = [g.to_local() if isinstance(g, DTensor) else g for g in grads]
        for number in range(2):
            torch.testing.assert_close(found["op", number], found["torch", number])
        torch.testing.assert_close(found["style", 1], found["DTensor", 1])
        torch.testing.assert_close(found["op", 1], [team.size * grad for grad in found["style", 1]])

    simulate_mesh(main)


def assert_near(out, wanted):
    """Equal to rounding; results of bf16 against those of the same numbers in fp32, which torch sums in bf16."""
    if out.dtype == torch.float32:
        torch.testing.assert_close(out, wanted)
    else:
        assert (out - wanted).pow(2).mean() <= (4e-3**2) * wanted.pow(2).mean()


def compare_ops(mesh, team, gathers, scatters, dtype):
    assert install(mesh)
    name, fused = mesh.get_group().group_name, torch.ops.symm_mem
    for shape, dim, several, returns in gathers:
        A = randn(*shape, seed=team.rank, dtype=dtype)
        # The columns of the first B are contiguous, the rows of the others.
        Bs = [randn(16, 8, seed=9, dtype=dtype), *(randn(24, 16, seed=i, dtype=dtype).t() for i in range(1, several))]
        gathered, outs = fused.fused_all_gather_matmul(A, Bs, dim, name, return_A=returns)
        wanted, all_wanted = symm_mem._fused_all_gather_matmul_fallback(
            A.float(), [B.float() for B in Bs], dim, name, return_A=True
        )
        assert torch.equal(gathered.float(), wanted) if returns else gathered is None
        for out, of_torch in zip(outs, all_wanted, strict=True):
            assert_near(out, of_torch)
    for shape, dim, how in scatters:
        A, B = randn(*shape, seed=team.rank, dtype=dtype), randn(16, 8, seed=5 + team.rank, dtype=dtype)
        out = fused.fused_matmul_reduce_scatter(A, B, how, dim, name)
        assert_near(out, symm_mem._fused_matmul_reduce_scatter_fallback(A.float(), B.float(), how, dim, name))
    assert all(on_weft for _, on_weft in decided(mesh))


def test_fused_ops_give_the_results_of_torch_s_decomposed_ops(simulate_mesh):  # noqa: F811
    simulate_mesh(lambda mesh, team: compare_ops(mesh, team, GATHERS, SCATTERS, torch.float32))


@pytest.mark.sweep
@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fused_ops_in_every_layout(simulate_mesh, world_size, dtype):  # noqa: F811
    gathers = [
        (shape, dim, several, returns)
        for shape in ((4, 16), (2, 3, 16), (2, 1, 2, 16))
        for dim, several, returns in itertools.product(range(len(shape) - 1), (1, 2), (False, True))
    ]
    scatters = [
        (shape, dim, how)
        for shape in ((8, 16), (4, 8, 16), (4, 4, 4, 16))
        for dim, how in itertools.product(range(len(shape) - 1), ("sum", "avg"))
    ]
    simulate_mesh(lambda mesh, team: compare_ops(mesh, team, gathers, scatters, dtype), world_size)


def test_what_weft_cannot_do_is_torch_s_with_one_line_in_the_log(simulate_mesh, caplog):  # noqa: F811
    def main(mesh, team):
        assert install(mesh)
        name, fused = mesh.get_group().group_name, torch.ops.symm_mem
        A, B = randn(8, 8, seed=team.rank), randn(16, 8)
        for _ in range(3):
            by_columns = fused.fused_all_gather_matmul(A, [B], 1, name)
            torch.testing.assert_close(
                by_columns, symm_mem._fused_all_gather_matmul_fallback(A, [B], 1, name, return_A=True)
            )
            doubles = fused.fused_matmul_reduce_scatter(A.double(), B[:8].double(), "sum", 0, name)
            assert doubles.dtype == torch.float64
        assert decided(mesh) == {("all_gather_matmul", False), ("matmul_reduce_scatter", False)}

    with caplog.at_level(logging.WARNING, "weft"):
        simulate_mesh(main)
    lines = sorted({record.getMessage() for record in caplog.records})
    assert len(lines) == 2 and len(caplog.records) == 4, "one line of each rank for each kind"
    assert "gather_dim=1 of 2 dimensions does not gather rows" in lines[0]
    assert "torch.float64 are not one of fp16, bf16, fp32" in lines[1]


def test_a_full_heap_leaves_the_call_to_torch(simulate_mesh, caplog):  # noqa: F811
    def main(mesh, team):
        assert install(mesh, heap_bytes=1 << 16)
        name, A, B = mesh.get_group().group_name, randn(64, 64, seed=team.rank), randn(64, 8)
        for _ in range(2):
            out = torch.ops.symm_mem.fused_all_gather_matmul(A, [B], 0, name)
            torch.testing.assert_close(out, symm_mem._fused_all_gather_matmul_fallback(A, [B], 0, name, return_A=True))
        assert decided(mesh) == {("all_gather_matmul", False)}

    simulate_mesh(main, heap_bytes=1 << 16)
    assert {record.levelno for record in caplog.records} == {logging.WARNING} and len(caplog.records) == 2
    assert "bytes wanted of a symmetric heap" in caplog.text


def test_a_group_whose_team_was_closed_gets_another(simulate_mesh):  # noqa: F811
    def main(mesh, team):
        assert install(mesh)
        team.close()
        name, A, B = mesh.get_group().group_name, randn(4, 16, seed=team.rank), randn(16, 8)
        out = torch.ops.symm_mem.fused_matmul_reduce_scatter(A, B, "sum", 0, name)
        torch.testing.assert_close(out, symm_mem._fused_matmul_reduce_scatter_fallback(A, B, "sum", 0, name))
        return Fallback.of(mesh).team is not team

    assert simulate_mesh(main, sms=4) == [True, True]


def test_groups_over_nodes_and_uninstalled_ones_are_torch_s(simulate_mesh, caplog):  # noqa: F811
    def main(mesh, team):
        assert install(mesh) is (team.rail is None)
        weft_torch.uninstall()
        with pytest.raises(NotImplementedError, match="CPU"):  # torch's ops have no CPU kernel
            torch.ops.symm_mem.fused_matmul_reduce_scatter(
                randn(4, 16), randn(16, 8), "sum", 0, mesh.get_group().group_name
            )

    simulate_mesh(main, node_size=1)
    assert "within one node, not 2 nodes x 1 ranks" in caplog.text and len(caplog.records) == 2
    simulate_mesh(main)


def test_uninstall_gives_the_kernel_before_back(recwarn):
    earlier, x = torch.library.Library("symm_mem", "IMPL"), torch.zeros(2, 2)
    earlier.impl("fused_matmul_reduce_scatter", lambda A, *_: A + 1, "CPU")
    try:
        weft_torch._register("CPU")
        weft_torch.uninstall()
        assert torch.equal(torch.ops.symm_mem.fused_matmul_reduce_scatter(x, x, "sum", 0, "0"), x + 1)
    finally:
        earlier._destroy()
    assert not list(recwarn)


@pytest.mark.sweep
def test_async_tp_of_torch_compile_runs_on_weft(simulate_mesh, monkeypatch):  # noqa: F811
    """Forward and backward of torch's own styles, whose collectives and GEMMs the compiler fuses into torch's ops."""
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    monkeypatch.setattr(symm_mem, "is_symm_mem_enabled_for_group", lambda group_name: True)

    def main(mesh, team):
        assert install(mesh)
        model = parallelize_module(Block(False), mesh, plan_of(ColwiseParallel, RowwiseParallel, 0))
        x, results = local(randn(4, 16), team, 0), []
        with inductor.patch(_micro_pipeline_tp=True, force_disable_caches=True):  # of this thread
            for run in (model, torch.compile(model)):
                out = run(x)
                results.append([out, *torch.autograd.grad(out.square().sum(), list(model.parameters()))])
        for eager, compiled in zip(*results, strict=True):
            torch.testing.assert_close(whole(compiled), whole(eager))
        assert decided(mesh) == {("all_gather_matmul", True), ("matmul_reduce_scatter", True)}

    simulate_mesh(main, sms=4)


# --- styles ----------------------------------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self, bias):
        super().__init__()
        self.up, self.down = nn.Linear(16, 32, bias=bias), nn.Linear(32, 16, bias=bias)
        for number, weight in enumerate(self.parameters()):
            with torch.no_grad():
                weight.copy_(randn(*weight.shape, seed=number) * 0.2)

    def forward(self, x):
        return self.down(nn.functional.silu(self.up(x)))


def plan_of(colwise, rowwise, dim):
    """Tensor parallelism of a Block, with tokens sharded along ``dim`` between blocks; None: replicated."""
    layout = Replicate() if dim is None else Shard(dim)
    return {"up": colwise(input_layouts=layout), "down": rowwise(output_layouts=layout)}


def local(x, team, dim):
    return x if dim is None else x.chunk(team.size, dim)[team.rank]


def trained(block, x, steps):
    optimizer = torch.optim.SGD(block.parameters(), lr=0.5)
    for _ in range(steps):
        optimizer.zero_grad()
        (block(x) ** 2).mean().backward()
        optimizer.step()
    return block


def whole(x):
    return x.full_tensor() if isinstance(x, DTensor) else x


STYLES = [((4, 16), 0, True), ((2, 4, 16), 1, False), ((4, 16), None, True)]


def compare_styles(mesh, team, shape, dim, bias):
    x = local(randn(*shape), team, dim).requires_grad_()
    same = x.detach().clone().requires_grad_()
    mine = parallelize_module(Block(bias), mesh, plan_of(WeftColwiseParallel, WeftRowwiseParallel, dim))
    theirs = parallelize_module(Block(bias), mesh, plan_of(ColwiseParallel, RowwiseParallel, dim))
    factor = randn(*shape, seed=7)
    outs = mine(x), theirs(same)
    torch.testing.assert_close(*outs)
    for out in outs:
        (out * local(factor, team, dim)).sum().backward()
    torch.testing.assert_close(x.grad, same.grad)
    for (name, one), other in zip(mine.named_parameters(), theirs.parameters(), strict=True):
        assert one.placements == other.placements
        torch.testing.assert_close(whole(one.grad), whole(other.grad), msg=lambda m, name=name: f"{name}: {m}")
    sharded = {("all_gather_matmul", True), ("matmul_reduce_scatter", True)}
    assert decided(mesh) == ({("matmul_all_reduce", True)} if dim is None else sharded)


@pytest.mark.parametrize(("shape", "dim", "bias"), STYLES)
def test_styles_give_the_results_and_gradients_of_torch_s(simulate_mesh, shape, dim, bias):  # noqa: F811
    simulate_mesh(lambda mesh, team: compare_styles(mesh, team, shape, dim, bias))


@pytest.mark.sweep
@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("shape", "dim"), [((8, 16), 0), ((8, 16), None), ((4, 8, 16), 0), ((4, 8, 16), 1)])
def test_styles_in_every_layout(simulate_mesh, world_size, shape, dim, bias):  # noqa: F811
    simulate_mesh(lambda mesh, team: compare_styles(mesh, team, shape, dim, bias), world_size)


class Model(nn.Module):
    """A block behind a norm, and the residual connection around both."""

    def __init__(self):
        super().__init__()
        self.norm, self.block = nn.RMSNorm(16, eps=1e-5), Block(True)

    def forward(self, x):
        return x + self.block(self.norm(x))


def test_two_steps_of_sgd_equal_those_of_one_process(simulate_mesh):  # noqa: F811
    """Sequence parallelism as in torchtitan: DTensors of sharded tokens between the layers."""
    x = randn(2, 4, 16)
    wanted = {name: weight.detach() for name, weight in trained(Model(), x, 2).named_parameters()}

    def main(mesh, team):
        plan = {
            "norm": SequenceParallel(),
            "block.up": WeftColwiseParallel(input_layouts=Shard(1)),
            "block.down": WeftRowwiseParallel(output_layouts=Shard(1), use_local_output=False),
        }
        model = parallelize_module(Model(), mesh, plan)
        for name, weight in trained(model, distribute_tensor(x, mesh, [Shard(1)]), 2).named_parameters():
            torch.testing.assert_close(weight.full_tensor().detach(), wanted[name])
        assert decided(mesh) == {("all_gather_matmul", True), ("matmul_reduce_scatter", True)}

    simulate_mesh(main)


def test_autocast_is_torch_s(simulate_mesh):  # noqa: F811
    def main(mesh, team):
        block = parallelize_module(Block(False), mesh, plan_of(WeftColwiseParallel, WeftRowwiseParallel, 0))
        with torch.autocast("cpu", torch.bfloat16):
            out = block(local(randn(4, 16), team, 0))
        assert out.dtype == torch.bfloat16 and out.isfinite().all()
        assert decided(mesh) == set()

    simulate_mesh(main)


def test_what_the_styles_cannot_do_is_torch_s(simulate_mesh, caplog):  # noqa: F811
    def main(mesh, team):
        x = randn(3, 16)  # 3 rows do not divide by two ranks
        plan = {"up": WeftColwiseParallel(), "down": WeftRowwiseParallel(output_layouts=Shard(0))}
        block = parallelize_module(Block(False), mesh, plan)
        given = distribute_tensor(x, mesh, [Replicate()])
        rows = 2 - team.rank
        out = block(given)
        assert out.shape == (rows, 16)
        torch.testing.assert_close(out, Block(False)(x).tensor_split([2])[team.rank])

    simulate_mesh(main)
    assert "size 3 of dimension 0 is not divisible by 2 ranks" in caplog.text and len(caplog.records) == 2
