"""Commands of the documents: those that a laptop can run are run, the others read by the parser of their program.

Run elsewhere  those of console blocks of the pages in documents.FOLLOWED, by the tests named there
Run here       other complete ones of weft and python, but for those of NOT_RUN and of pages in documents.PAST
Parsed         all of a program in parsers.PARSERS, run or not, but for those of NOT_PARSED
Placed         those of a program in FOREIGN

A command that fits nothing fails here until it is placed. `pytest --collect-only -q tests/test_commands.py` lists all of them.
"""

import re
import shutil
from textwrap import indent

import pytest
import torch

from tests.commands import commands
from tests.documents import FOLLOWED, PAGES, PAST, ROOT, blocks, run
from tests.parsers import MAINS, files_of, has_placeholders, is_only_named, measures, parse, parse_values
from weft.models import builtin

# Patterns of whole commands, with the reason not to run them.
NOT_RUN = {
    r"python -m benchmarks\.(gpu_)?costs.*": "fits for a minute and writes files of the tree; tests/costs",
    r"weft bench --regret (?!.*--check-only).*": "times designs, which takes GPUs; tests/bench/regret",
    r"weft doctor --measure.*": "measures GPUs; tests/tune/test_constants.py",
    # What they do is tested by other means.
    r"weft serve.*": "serves until it is stopped; tests/serve",
    r"python -m tests\.serve\.talking .*": "writes a checkpoint into the checkout, as tests/serve do elsewhere",
    r"python scripts/clients\.py.*": "needs a server; tests/serve",
    r"weft bench serve.*": "needs a server; tests/bench/serving",
    r"weft bench invariance.*": "GPUs, or minutes of virtual ranks; tests/engine/test_invariant_engine.py",
    r"weft --install-completion": "changes the reader's shell; tests/cli/test_completion.py",
    r"python -m benchmarks\.(over_nodes|performance|pictures|predict|fp8_page|engine_page).*": "writes pages; tests/benchmarks",
    r"python -m tests\.language\.primitives_page": "writes a page, which test_primitives_page.py compares",
    r"python -m tests\.runtime\.host_page": "writes a page, which test_host_page.py compares",
    r"python -m tests\.simulator\.simulated_triton": "writes a page, which tests/simulator compares",
    r"python -m tests\.zoo\.table": "writes tables, which tests/zoo/test_zoo.py compares",
    # GPUs.
    r"python -m (benchmarks\.(engines run|lab\.\w+|serving|start_up|trace_cost)|tests\.gpu\.suite).*": "GPUs",
    r"python -m benchmarks\.(one_gpu_regret|latent_regret|searched_starts) OUT\.json": "GPUs; test_one_gpu_regret.py",
    r"python -m benchmarks\.(delta_and_latents|doors\.\w+)(?<!thresholds).*": "GPUs; tests/benchmarks/test_doors.py",
    r"weft bench (--eager|--regret).*": "GPUs; tests/bench",
    r"weft bench .*--out benchmarks/results/.*": "GPUs, whose results it records",
    r"weft (bench|generate|tune) .*--model (qwen|llama|mistral|gpt-oss|path).*": "GPUs: virtual ranks take small models only",
    r"python -m benchmarks\.(step_errors|planned_steps)": "prints docs/planning.md's table; tests/predict",
    r"python -m benchmarks\.regrets": "prints docs/costs.md's table; tests/benchmarks/test_choices.py",
    r"python -m benchmarks\.recipes": "prints predictions; tests/models/test_steps.py",
    r"weft bench train@qwen3-32b.*": "GPUs: virtual ranks take small layers only",
    r"weft bench --nodes.*": "ranks of torchrun, or four GPUs",
    # Others.
    r"weft check tests/check/published/.*": "needs fetched files; tests/check/test_published.py",
    r"weft check examples/scales_after_rows\.py.*": "has a finding; tests/test_readme.py",
    r"weft check .*--gpu.*": "GPUs; tests/check/test_gpu.py",
    r"python -m tests\.zoo\.on_gpus.*": "GPUs",
    r"weft check FILE --torch": "a file of the reader's",
    r"weft generate --model Qwen/.*": "a checkpoint of the hub",
    r"weft generate --expert-layout 2x4": "a flag of models of experts, on eight ranks",
    r"python -m benchmarks\.(fp8_gemm|fp8_grouped|four_bit_gemm|speculation).*": "GPUs",
    r"python -m benchmarks\.quantized_perplexity.*": "a model of a package that is not installed for tests",
    r"python benchmarks/check_cost\.py.*": "writes what it measures into the checkout",
    r"python -m tests\.check\.sweep.*": "hours; a part of `make sweep`",
    r"python -m tests\.golden record FILE": "90 s; tests/golden/test_golden.py",
    r"python scripts/package_check\.py.*": "minutes; a part of `make sweep`",
    r"python scripts/figures\.py.*": "counts the lines of a checkout",
}

# Programs that are not ours.
FOREIGN = {
    "cd": "changes the folder of the reader's shell",
    "curl": "asks a server, as tests/serve do in Python",
    "git": "needs a commit, or where the repository lies",
    "head": "a part of Slurm's script",
    "hf": "downloads a checkpoint",
    "nvidia-cuda-mps-control": "NVIDIA's service for sharing a GPU",
    "scontrol": "a part of Slurm's script",
    "vllm": "vLLM's; tests/integrations/test_vllm.py",
}
# First words of code spans that look like a command.
NO_COMMANDS = {
    "also": "a line of a report of `weft check`",
    "buffer_wbl2": "an instruction",
    "cp.async.bulk.wait_group": "an instruction",
    "gathered": "words of a picture",
    "s_waitcnt": "an instruction",
    "sc0": "flags of an instruction",
    "shown": "a line of a report of `weft check --gpu`",
}

# Patterns of commands that no parser of today takes.
NOT_PARSED = {
    r"python benchmarks/run\.py.*": "became `weft bench`",
    r".*python -m sglang\.launch_server.*": "SGLang's; tests/integrations/test_sglang.py",
    r"python -m benchmarks\.lab\.cublas .*--tuned weft/ops/tuned.*": "the table has moved",
}

# What a file of the reader's own has.
MAIN = """
import weft


def main(team):
    weft.ops.barrier(team)
"""


def distinct():
    """Commands of all pages, as text, each with the places where it stands."""
    found = {}
    for page in PAGES:
        for command in commands(page):
            if command.words[0] not in NO_COMMANDS:
                found.setdefault(str(command), []).append(command)
    return found


COMMANDS = distinct()


def reason_of(patterns, command):
    """Reason of the first pattern that fits a whole command, or None."""
    return next((reason for pattern, reason in patterns.items() if re.fullmatch(pattern, command)), None)


def is_run_elsewhere(command):
    return any(place.is_turn and place.page in FOLLOWED for place in COMMANDS[command])


def is_complete(command):
    """Not one with `…` or OP in place of a name, nor the bare name of a subcommand that needs arguments."""
    place = COMMANDS[command][0]
    return place.is_whole and not has_placeholders(place.words) and not is_only_named(place.words)


def is_runnable(command):
    return (
        COMMANDS[command][0].words[0] in ("weft", "python")
        and is_complete(command)
        and not is_run_elsewhere(command)
        and not all(place.page in PAST for place in COMMANDS[command])
        and reason_of(NOT_PARSED | NOT_RUN, command) is None
    )


def to_run():
    """Runnable commands but those whose words all stand in another one, of which they are a part."""
    words = {command: {*COMMANDS[command][0].words} for command in COMMANDS if is_runnable(command)}
    return sorted(one for one in words if not any(words[one] < words[other] for other in words))


def told_apart(command):
    """A command's program with its subcommand or script, alone and with each flag."""
    words = COMMANDS[command][0].words
    program = " ".join(words[:3] if words[1] == "-m" else words[:2])
    return {(program, word.partition("=")[0] if word.startswith("-") else "") for word in words}


def in_turn():
    """Commands that can run, as parameters. Those whose program and flags all stand in earlier ones are left to the sweep."""
    seen, found = set(), []
    for command in sorted(to_run(), key=lambda command: (-len(told_apart(command)), command)):
        found.append(pytest.param(command, marks=() if told_apart(command) - seen else pytest.mark.sweep))
        seen |= told_apart(command)
    return found


@pytest.mark.parametrize("command", in_turn(), ids=lambda command: command[:90])
def test_a_command_runs(command, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)  # on a machine with GPUs it would run there
    monkeypatch.chdir(tmp_path)
    write_files_of_the_reader(command, tmp_path)
    printed = run(made_short(command))
    assert printed.startswith("0 finding(s)") if command.startswith("weft check") else printed


def made_short(command):
    """The command with few schedules, ranks and modes, where the reader's are many."""
    if command.startswith("weft check"):
        command = f"{re.sub(r'--schedules [0-9]+', '', command)} --schedules 4"
    if command.startswith("weft generate") and "--world-size" not in command:
        return f"{command} --world-size 2"
    return f"{command} --mode replicated" if command.startswith("weft bench model") else command


def write_files_of_the_reader(command, folder):
    """What the reader of a command has in the folder by then."""
    files = dict.fromkeys(MAINS, MAIN) | {"prompts.txt": "1+1=\n20+22=\n"}
    for place in COMMANDS[command]:
        files |= {name: text for name, text in files_of(place.page).items() if "/" not in name}
    for name, text in files.items():
        (folder / name).write_text(text)
    for file in (ROOT / "benchmarks" / "lab" / "h200-engines").glob("*-qwen3-0.6b.json"):
        shutil.copy(file, folder / file.name.replace("-qwen3-0.6b", ""))
    (folder / "examples").symlink_to(ROOT / "examples")
    (folder / "DIR").symlink_to(builtin.PATH)
    if command.startswith("weft trace"):
        write_the_trace(folder)


def write_the_trace(folder):
    """The trace that docs/trace.md makes, by its own lines."""
    [block] = (block for block in blocks(ROOT / "docs" / "trace.md") if block.language == "python")
    (folder / "traced.py").write_text(
        f"import torch\nimport weft\n\ndef main(team):\n    x = w = torch.ones(16, 16)\n{indent(block.text, '    ')}\n"
        "weft.simulate(main, 2)\n"
    )
    run("python traced.py")


@pytest.mark.parametrize("command", sorted(COMMANDS), ids=lambda command: command[:90])
def test_a_command_is_understood(command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # where files that it names may be made
    for place in COMMANDS[command]:
        if place.words[0] not in FOREIGN and reason_of(NOT_PARSED, command) is None:
            parse(place)
            # An op of docs/adding-an-op.md is there in the test of that page alone.
            if measures(place) and place.page not in PAST and "ring-add" not in command:
                parse_values(place)


def test_every_reason_has_a_command():
    for pattern in {**NOT_RUN, **NOT_PARSED}:
        assert any(re.fullmatch(pattern, command) for command in COMMANDS), f"no command fits {pattern}"
    first = {command.words[0] for page in PAGES for command in commands(page)}
    assert {*FOREIGN, *NO_COMMANDS} <= first


def test_all_forms_of_commands_are_found():
    """One of each form that tests/commands.py knows."""
    for command in (
        "weft doctor",  # a span of two words
        "python -m tests.gpu.suite",  # a span that is broken over two lines
        "weft generate --prompt 1+1= --regex '[7-9]{3}'",  # an indented line
        "sh benchmarks/moe.sh h200-x2-moe",  # a block of sh
        "torchrun -m weft doctor --nodes",  # a list of YAML
        "vllm serve NAME --tensor-parallel-size 2",  # a block without a language, behind a variable
    ):
        assert command in COMMANDS, command
