"""The ops as torch sees them: schemas, fake kernels, ``torch.compile``, autograd. All on virtual ranks."""

import pytest
import torch

import weft
from tests.ops.closeness import assert_close, assert_identical
from weft import ops
from weft.runtime.team import find_team


def several(x, team):
    """A function of several ops, as a model would call them."""
    y = ops.all_reduce(x * 2, team)
    z = ops.all_gather(y[:2] + 1, team)
    z = ops.all_to_all(z.float(), team)
    return ops.reduce_scatter(z, team) + ops.all_reduce(y.sum(), team, "one_shot")


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiles_without_a_graph_break(backend):
    def main(team):
        compiled = torch.compile(lambda x: several(x, team), fullgraph=True, backend=backend)
        for call in range(3):
            x = torch.randn(6, 20, generator=torch.Generator().manual_seed(10 * call + team.rank)).bfloat16()
            assert_identical(compiled(x), several(x, team), what=f"call {call}")

    weft.simulate(main, 2)
    torch._dynamo.reset()


def test_wrong_arguments_are_refused_while_compiling():
    def main(team):
        compiled = torch.compile(lambda x: ops.reduce_scatter(x, team), fullgraph=True, backend="aot_eager")
        with pytest.raises(Exception, match="not divisible by world_size=2"):
            compiled(torch.ones(3, 4))

    weft.simulate(main, 2)
    torch._dynamo.reset()


@pytest.mark.parametrize("shape", [(4, 6), (2, 0), (8,)])
def test_schemas_and_fakes_tell_the_truth(shape):
    def main(team):
        x = torch.randn(shape)
        calls = {
            torch.ops.weft.all_reduce.default: (x, team.name, "auto"),
            torch.ops.weft.all_gather.default: (x, team.name),
            torch.ops.weft.reduce_scatter.default: (x, team.name),
            torch.ops.weft.all_to_all.default: (x.t().contiguous().t() if x.dim() == 2 else x, team.name),
        }
        for op, args in calls.items():
            torch.library.opcheck(op, args, test_utils=("test_schema", "test_faketensor", "test_autograd_registration"))

    weft.simulate(main, 2)


def test_an_unknown_team_is_named():
    with pytest.raises(ValueError, match="no team called 'nobody'"):
        torch.ops.weft.all_reduce(torch.ones(3), "nobody", "auto")
    with pytest.raises(ValueError, match="no team called"):
        find_team("nobody")


@pytest.mark.parametrize("op", ["all_reduce", "all_gather", "reduce_scatter", "all_to_all"])
def test_backward(op):
    """The gradient of sum over ranks of <weights_r, op(x)_r> by autograd, against the transposed map by hand."""

    def main(team):
        x = torch.randn(4, 5, generator=torch.Generator().manual_seed(team.rank), requires_grad=True)
        y = getattr(ops, op)(x, team)
        weights = torch.randn(y.shape, generator=torch.Generator().manual_seed(100 + team.rank))
        (y * weights).sum().backward()
        return x.grad, weights

    by_rank = weft.simulate(main, 2)
    weights = [w for _, w in by_rank]
    for rank, (grad, _) in enumerate(by_rank):
        expected = {
            "all_reduce": lambda r: weights[0] + weights[1],
            "all_gather": lambda r: sum(w.chunk(2)[r] for w in weights),
            "reduce_scatter": lambda r: torch.cat(weights),
            "all_to_all": lambda r: torch.cat([w.chunk(2)[r] for w in weights]),
        }[op](rank)
        assert_close(grad, expected, 2, what=f"{op} gradient of rank {rank}")
