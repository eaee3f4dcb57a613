"""`weft bench --nodes`: the ops over logical nodes of virtual ranks."""

import pytest
import torch
import typer
from typer.testing import CliRunner

from tests.sampled import sampled
from weft.bench.command import NODE_OPS
from weft.bench.command import command as bench

pytestmark = pytest.mark.skipif(torch.cuda.device_count() > 0, reason="for machines without a GPU")
app = typer.Typer(pretty_exceptions_enable=False)
app.command("bench")(bench)


def run(*words):
    return CliRunner().invoke(app, [*words, "--device", "sim"])


@pytest.mark.parametrize(
    ("ops", "world_size"), sampled([(("all-to-all",), 2), ((), 4)], lambda ops, world_size: world_size == 2)
)
def test_answers_over_nodes_are_checked(ops, world_size):
    result = run(*ops, "--nodes", "--node-size", str(world_size // 2), "--world-size", str(world_size))
    assert result.exit_code == 0, result.output
    for op in ops or NODE_OPS:
        assert (
            f"{op}, bf16, world size {world_size} (simulated ranks, 2 nodes x {world_size // 2} ranks)" in result.stdout
        )


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--nodes", "--world-size", "2"), "all 2 ranks are of one node; pass --node-size, or start it by torchrun"),
        ((), "no op is named; name one, or pass --nodes"),
        (("mlp", "--nodes", "--node-size", "1"), "op 'mlp' is not measured over nodes; choose one of all-reduce"),
        (("all-reduce", "--node-size", "1"), "--node-size 1 is of --nodes; pass both"),
    ],
)
def test_what_has_no_nodes_is_refused_in_one_line(words, said):
    result = run(*words)
    assert result.exit_code != 0 and said in result.output
