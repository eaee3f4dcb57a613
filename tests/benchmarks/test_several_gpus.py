"""The commands of benchmarks/several_gpus.sh: each is one that weft, or the module that it names, takes."""

import importlib.util

import pytest
from typer.main import get_command

from tests.benchmarks.scripts import FOLDER, commands_of
from weft.bench.command import BenchFlags
from weft.bench.models.flags import ModelFlags
from weft.cli import app
from weft.tune.command import TuneFlags

STEPS = (
    "check", "machine", "suite", "collectives", "gemms", "layers", "models", "train", "doors", "moe", "long", "nodes",
    "bits", "start", "adapters", "engines", "vllm", "regret", "plans", "tune",
)  # fmt: skip
SWITCHES = "--eager", "--check", "--breakdown", "--nodes", "--random-cache"


def split(words):
    """(ops, values of flags) of the words of `weft bench`."""
    at = next(index for index, word in enumerate(words) if word.startswith("--"))
    rest, flags = [word for word in words[at:] if word not in SWITCHES], {}
    while rest:
        flag, flags[flag] = rest[0], rest[1]
        assert flag.startswith("--"), words
        rest = rest[2:]
    return tuple(words[:at]), flags


@pytest.mark.parametrize("world_size", [pytest.param(2, marks=pytest.mark.sweep), 4])
def test_every_command_is_valid(tmp_path, world_size):
    measured, modules = {}, set()
    for module, *words in commands_of("several_gpus.sh", tmp_path, str(world_size), *STEPS):
        modules.add(module)
        assert importlib.util.find_spec(module) is not None
        if module != "weft":
            continue
        command, *words = words
        if words[:1] == ["invariance"]:
            command, words = "bench invariance", words[1:]
        get_command(app).commands[command].make_context(command, [*words])  # a UsageError for flags that there are not
        if command == "bench" and not {"--nodes", "--regret"} & set(words):
            ops, flags = split(words)
            assert flags["--world-size"] == str(world_size)
            options = BenchFlags(
                ops=ops,
                providers=flags.get("--providers"),
                of_models=ModelFlags(model=flags.get("--model"), random_cache="--random-cache" in words),
            )
            for workload in options.workloads(world_size, simulated=False):
                # One file an op in a folder: a later command would replace an earlier one's.
                key = flags["--out"], workload.name
                assert workload.shapes and key not in measured
                measured[key] = workload
        elif command == "tune":
            assert TuneFlags(ops=split(words)[0]).shapes_by_op()
    assert modules == {
        "weft", "pytest", "tests.gpu.suite", "benchmarks.engines", "benchmarks.doors.torch_tp",
        "benchmarks.doors.transformers_llama", "benchmarks.serving", "benchmarks.lab.adapters", "benchmarks.lab.sliced",
        "benchmarks.lab.spread_prompts", "benchmarks.planned_steps", "benchmarks.start_up", "scripts.soak",
    }  # fmt: skip
    main = {name for folder, name in measured if folder == f"benchmarks/results/h200-x{world_size}"}
    before = {file.name.split(".")[0] for file in (FOLDER / "results" / f"h200-x{world_size}").glob("*.json")}
    assert before - {"model"} <= main  # whole models have folders of their own


def test_other_numbers_and_steps_are_refused(tmp_path):
    assert commands_of("several_gpus.sh", tmp_path, "3") == [] == commands_of("several_gpus.sh", tmp_path, "4", "all")
