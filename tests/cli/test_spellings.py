"""Flags under the names that users of vLLM and transformers type: the same flag, of which two values are refused."""

import pytest
from typer.testing import CliRunner

import weft
from weft.cli import app
from weft.engine.config import VLLM_NAMES, EngineConfig

WORLD_SIZE = ("--world-size", "--tensor-parallel-size", "-tp")
SPELLINGS = {
    "generate": (WORLD_SIZE, ("--max-tokens", "--max-new-tokens"), ("--max-seq-len", "--max-model-len")),
    "bench": (WORLD_SIZE,),
    "check": (WORLD_SIZE,),
    "tune": (WORLD_SIZE,),
}
FLAGS = [(command, spellings) for command, flags in SPELLINGS.items() for spellings in flags]


@pytest.fixture
def run(tmp_path):
    (tmp_path / "script.py").write_text("def main(team):\n    pass\n")
    words = {"generate": ("--device", "sim"), "check": (str(tmp_path / "script.py"),)}

    def run(command, *flags):
        given = [command, *words.get(command, ("all-reduce", "--device", "sim")), *map(str, flags)]
        return CliRunner().invoke(app, given)

    return run


@pytest.mark.parametrize(
    ("command", "spellings"), FLAGS, ids=lambda value: value if isinstance(value, str) else value[0]
)
def test_every_spelling_gives_its_value(command, spellings, run):
    wrong = 0 if command == "generate" else "x"  # refused by the flag's own check, which shows that it arrived
    for flags in ((one, wrong) for one in spellings):
        result = run(command, *flags)
        assert (result.exit_code, result.stdout) == (2, ""), result.output
        name = spellings[0].removeprefix("--")
        assert any(f"{form}{wrong}" in result.stderr for form in (f"{name} ", f"{name.replace('-', '_')}=")), (
            result.stderr
        )


@pytest.mark.parametrize(
    ("command", "spellings"), FLAGS, ids=lambda value: value if isinstance(value, str) else value[0]
)
def test_two_values_under_two_spellings_are_refused(command, spellings, run):
    for other in spellings[1:]:
        for flags in ((spellings[0], 2, other, 3), (other, 2, f"{spellings[0]}=3")):
            result = run(command, *flags)
            assert (result.exit_code, result.stdout) == (2, ""), result.output
            also = ", ".join(spellings[1:])
            assert result.stderr == f"weft: {spellings[0]} (also {also}) is given as 2 and 3; give one value\n"
        assert "give one value" not in run(command, spellings[0], 0, other, 0).stderr


@pytest.mark.parametrize("command", SPELLINGS)
def test_help_names_all_spellings_in_one_line(command):
    lines = CliRunner().invoke(app, [command, "--help"]).stdout.splitlines()
    for spellings in SPELLINGS[command]:
        assert any(set(spellings) <= set(line.replace(",", " ").split()) for line in lines), spellings


def test_several_spellings_make_one_answer(run):
    result = run("generate", "-tp", 1, "--world-size", 1, "--max-tokens", 2, "--max-model-len", 32)
    assert result.stdout.strip() == "123+456=57", result.output


def test_names_of_vllm_in_python_are_refused_with_those_of_weft():
    with pytest.raises(TypeError, match="tensor_parallel_size= is not an option .*; weft's name is world_size, of LLM"):
        weft.LLM(tensor_parallel_size=2)
    for name, ours in VLLM_NAMES.items():
        with pytest.raises(TypeError, match=f"^{name}= is not an option of an engine; weft's name is {ours}$"):
            EngineConfig.of(None, {name: 2})
        assert ours.split(",")[0] in (*EngineConfig.__slots__, "world_size")
