"""Ops as objects: the registry, pure plans, and torch ops with schemas, fake kernels, autograd. All on virtual ranks."""

import dataclasses
import math
import threading
from unittest import mock

import pytest
import torch
from torch.utils._pytree import tree_leaves

import weft
from tests.ops.checking import assert_close, assert_identical, call_op, inputs_of
from tests.sampled import sampled
from weft import ops
from weft.ops.explain import Explanation
from weft.ops.layout import flat
from weft.ops.op import UNCHANGED, Op, find_op, registered
from weft.plan.planned import machine
from weft.runtime import capabilities
from weft.runtime.capabilities import Capabilities
from weft.runtime.team.team import find_team

OPS = list(registered())
H200 = Capabilities(device_name="NVIDIA H200", arch="sm_90", sms=132, memory_bytes=0, peer_access=(True,) * 2)


def test_names_and_aliases_are_unique():
    names = [spelling for op in OPS for spelling in {op.name, op.alias.replace("-", "_")}]
    assert len(set(names)) == len(names)
    assert all(isinstance(op, Op) and op.name.isidentifier() for op in OPS)


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_an_op_is_found_by_every_spelling_and_is_torch_s(op):
    for name in (op.name, op.alias, op.name.replace("_", "-"), op.alias.replace("-", "_")):
        assert find_op(name) is op
    schema = getattr(torch.ops.weft, op.name).default._schema
    assert schema.name == f"weft::{op.name}" and schema.arguments
    assert {argument.name for argument in schema.arguments if argument.is_write} == set(op.mutates)


@pytest.mark.parametrize("name", ["no_such_op", "", None, 3, "all reduce"])
def test_an_unknown_op_is_refused_with_those_there_are(name):
    with pytest.raises(ValueError, match=r"op=.* is not one of .*ag-gemm, .*reduce-scatter"):
        find_op(name)


def size_of(case):
    return math.prod(case.sizes)


@pytest.mark.parametrize("op", [op for op in OPS if any(op.cases())], ids=lambda op: op.name)
def test_fakes_have_the_shapes_and_dtypes_of_results(op):
    """Of the smallest case with elements at each world size of at most three, by its plan."""
    for world_size in (1, 2, 3):
        cases = [
            case for case in op.cases() if case.world_size == world_size and size_of(case) and case.data == "random"
        ]
        named = [case for case in cases if isinstance(case.design, str) and not case.fields]
        for case in sorted(named, key=size_of)[:1]:
            seen = []

            def noted(*arguments, seen=seen):
                result = op.forward(*arguments)
                seen.append([described(result), described(op.fake(*arguments))])
                return result

            with mock.patch.object(type(op), "dispatch", staticmethod(noted)):
                weft.simulate(lambda team, case=case: call_op(case, team, inputs_of(case, team.rank)), world_size)
            assert len(seen) >= world_size
            for real, fake in seen:
                assert real == fake, str(case)


def described(result):
    """(shape, dtype, strides) of each tensor; of an op that returns nothing none."""
    results = result if isinstance(result, (tuple, list)) else (result,)
    return [(x.shape, x.dtype, x.stride()) for x in results if x is not None]


def calls_of(op, here):
    """Calls of several sizes, where the op has plans."""
    for size in (1, 16, 300, 1 << 14):
        if op.sizes == ("M", "N", "K"):
            yield op.call_of((size * here.world_size, 512, 1024), torch.bfloat16, here)
        elif op.sizes == ("shape",):
            yield op.call_of(((size * here.world_size, 64),), torch.bfloat16, here)


@pytest.mark.parametrize("op", [op for op in OPS if op.sizes], ids=lambda op: op.name)
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_plan_is_a_function_of_call_and_machine(op, world_size):
    """The same object for equal arguments, equal to what is chosen anew; named designs are taken."""
    for caps in (capabilities.simulated(world_size), H200):
        here = machine(caps, world_size)
        assert machine(caps, world_size) is here
        for call in calls_of(op, here):
            planned = op.plan(call, here)
            assert op.plan(type(call)(*call), here) is planned
            again = op.choose(call, here)
            assert (again.name, again.design, again.row) == (planned.name, planned.design, planned.row)
            assert planned.reason and type(planned.design) is op.designs[planned.name]


@pytest.mark.parametrize("name", [*(op.name for op in OPS if not op.sizes), "barrier"])
def test_explain_says_in_one_line_why_there_is_no_plan(name):
    text = str(ops.explain(name))
    assert text.startswith(f"{name} has no plan: ") and len(text) > len(name) + 30 and "\n" not in text
    assert ("; its bits " in text) == (name != "barrier")
    with pytest.raises(ValueError, match=f"{name} has no plan that M=3 could change; leave it out"):
        ops.explain(name, M=3)


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_an_op_states_what_its_bits_depend_on(op):
    """By the class that names it, so that no op inherits a statement; ``explain`` prints it, by name and by alias.

    Of an op that does no arithmetic they depend on nothing.
    """
    assert all("bits" in vars(kind) for kind in type(op).__mro__ if "name" in vars(kind))
    assert isinstance(op.bits, str) or set(op.bits) == set(op.designs)
    for design in op.designs or ("kernel",):
        assert op.bits_of(design).startswith(("are invariant", "depend on ")), design
        assert (not op.bits_of(design).startswith(UNCHANGED)) or all(op.accuracy(case).exact for case in op.cases())
        if any(op.accuracy(case).exact for case in op.cases()):
            assert op.bits_of(design).startswith("are invariant"), design
    if op.sizes:
        case = next(case for case in op.cases() if isinstance(case.design, str))
        here = machine(H200, case.world_size)
        planned = op.plan(op.call_of_case(case, here), here)
        assert str(Explanation(op.name, "", planned)).endswith(f"\n  bits  {op.bits_of(planned.name)}")
    else:
        assert {str(ops.explain(name)).split("; its bits ")[1] for name in (op.name, op.alias)} == {op.bits}


def test_an_op_has_a_plan_or_says_why_not():
    assert [op.name for op in OPS if bool(op.sizes) == bool(op.no_plan)] == []


def test_sizes_may_be_left_open_while_compiling():
    """A size that is a symbol is no key of a plan: each call is planned anew, and results are those of eager calls."""

    def main(team):
        def both(x, up, down):
            y = ops.matmul_all_reduce(ops.all_gather_matmul(x, up, team), down, team)
            return ops.all_reduce(y, team)

        compiled = torch.compile(both, fullgraph=True, backend="aot_eager", dynamic=True)
        for rows in (5, 6, 7):
            generator = torch.Generator().manual_seed(10 * rows + team.rank)
            x, up, down = (torch.randn(shape, generator=generator) for shape in ((rows, 16), (24, 16), (16, 24)))
            assert_identical(compiled(x, up, down), both(x, up, down), what=f"{rows} rows")

    weft.simulate(main, 2)
    torch._dynamo.reset()


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


# Its results are parts of one receive buffer, an alias that no schema declares.
ALIASED = ("moe_dispatch",)


def forms(op):
    """The smallest cases that have all layouts and fields of the op's cases, on two ranks where it has such cases.

    Most fields come first. Designs are left to the plan, since a design is run without the torch op.
    """
    cases = [case for case in op.cases() if size_of(case)]
    world_size = max(size for size in (1, 2) if any(case.world_size == size for case in cases))
    found, seen = [], set()
    for case in sorted((case for case in cases if case.world_size == world_size), key=size_of):
        fields = {f"{name}={value}" if isinstance(value, (bool, str)) else name for name, value in case.fields}
        if new := {case.layout, *fields} - seen:
            seen |= new
            found.append(dataclasses.replace(case, design="auto"))
    return sorted(found, key=lambda case: -len(case.fields))


@pytest.mark.parametrize(
    ("case", "place"),
    sampled(
        [(case, place) for op in OPS if op.name not in ALIASED for place, case in enumerate(forms(op))],
        lambda case, place: place == 0,
    ),
    ids=str,
)
def test_schemas_and_fakes_tell_the_truth(case, place):
    """Of all ops that a call of the case asks for, with what it passes."""
    seen = {}

    def noted(op, *arguments):
        seen.setdefault(threading.get_ident(), []).append((op.torch_op, tuple(flat(arguments))))
        return op.forward(*arguments)

    def main(team):
        call_op(case, team, inputs_of(case, team.rank))
        called = tuple(seen.get(threading.get_ident(), ()))
        # All-reduces of partials have no torch op.
        assert called or (case.op == "all_reduce" and case.field("partials"))
        for op, arguments in called:
            in_fp8 = any(getattr(x, "dtype", None) == torch.float8_e4m3fn for x in tree_leaves(arguments))
            tests = ("test_schema", "test_faketensor", "test_autograd_registration")
            # The first multiplies tensors by numbers, which the CPU does not in e4m3.
            torch.library.opcheck(op, arguments, test_utils=tests[in_fp8:])

    with mock.patch.object(Op, "dispatch", noted):
        weft.simulate(main, case.world_size)


@pytest.mark.parametrize(("op", "variant"), [(op.name, variant) for op in OPS for variant in op.variants])
def test_a_call_keeps_the_variant_that_is_asked_for(op, variant):
    op = find_op(op)
    here = machine(capabilities.simulated(2, like="h200"), 2)
    sizes = tuple(64 if name == "head_dim" else 512 for name in op.sizes) if len(op.sizes) > 1 else ((512, 512),)
    assert getattr(op.call_of(sizes, torch.bfloat16, here, **{variant: True}), variant)
    with pytest.raises(TypeError):
        op.call_of(sizes, torch.bfloat16, here, no_such_variant=True)


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
