"""Links, paths, fences and Python of the documents. Their commands: tests/test_commands.py."""

import ast
import importlib
import inspect
import logging
import re

import pytest
import torch
from typer.main import get_command

import weft
from tests.documents import FOLLOWED, PAGES, PAST, ROOT, TUTORIALS, blocks, run
from weft.cli import app, vllm_flags

NOW = [page for page in PAGES if page not in PAST]
# Pages whose Python a test of their own runs.
RUN_ELSEWHERE = FOLLOWED | {
    ROOT / "README.md": "tests/test_readme.py",
    ROOT / "docs" / "host.md": "tests/runtime/test_host_page.py",
    ROOT / "docs" / "nodes.md": "tests/runtime/test_nodes.py",
    ROOT / "docs" / "porting.md": "tests/test_porting.py",
    ROOT / "docs" / "primitives.md": "tests/language/test_primitives_page.py",
}
# Pages whose Python is compiled only.
FRAGMENTS = {
    ROOT / "docs" / "check.md": "lines of a test and of a kernel",
    ROOT / "docs" / "pytorch.md": "lines of a program of torchtitan, or of one with a model and a mesh",
    ROOT / "docs" / "trace.md": "a call, which test_commands.py puts into a program",
    ROOT / "docs" / "transformers.md": "lines of a program that torchrun starts, with a checkpoint",
}


# Flags in running text of scripts and of other programs; tests/test_commands.py parses whole commands.
OTHER_FLAGS = {
    *(
        "--archives", "--help", "--fit", "--goals", "--page", "--resume", "--servers", "--share-gpus", "--table",
        "--without",
    ),
    *("--enable-deterministic-inference", "--enable-layernorm-sp", "--nproc-per-node", "--tp"),
}  # fmt: skip


def name_of(page):
    return page.relative_to(ROOT).as_posix()


def where(block):
    return f"{name_of(block.page)}:{block.line}"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page):
    links = re.findall(r"\[[^\]\n]+\]\((?!http)([^)\s]+)\)", page.read_text())
    for link in links:
        name, _, anchor = link.partition("#")
        target = page.parent / name if name else page
        assert target.exists(), f"{page.name}: {link} leads nowhere"
        assert not anchor or anchor in anchors(target.read_text()), f"{page.name}: {link} has no such heading"


def anchors(text: str) -> set[str]:
    """Anchors that GitHub makes of a page's headings."""
    headings = re.findall(r"^#+ (.*)$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_the_list_of_pages_has_all():
    docs = ROOT / "docs"
    pages = {page.relative_to(docs).as_posix() for page in (*docs.glob("*.md"), *TUTORIALS)} - {"README.md"}
    assert pages - set(re.findall(r"\]\(([\w/-]+\.md)\)", (docs / "README.md").read_text())) == set()


@pytest.mark.parametrize("page", NOW, ids=name_of)
def test_files_that_are_named_exist(page):
    own = {found for block in blocks(page) for found in re.findall(r"^# ([\w/]+\.py)$", block.text, flags=re.MULTILINE)}
    named = set(re.findall(r"(?<![\w/.])(?:weft|tests|benchmarks|scripts)/[\w/.-]*\w", page.read_text()))
    assert sorted(name for name in named - own if not list(ROOT.glob(name)) and not list(ROOT.glob(f"{name}*"))) == []


def test_flags_in_running_text_are_flags_of_weft():
    ours = flags_of(get_command(app)) | {name for flag in vllm_flags.FLAGS for name in flag.names} | OTHER_FLAGS
    named = [(flag, name_of(page)) for page in NOW for flag in re.findall(r"`(--[a-z][\w-]*)", page.read_text())]
    assert len(named) > 100
    assert [pair for pair in named if pair[0] not in ours] == []


def flags_of(command):
    """Spellings of the flags of a command and its subcommands."""
    own = {name for one in command.params for name in (*one.opts, *one.secondary_opts)}
    return own.union(*(flags_of(below) for below in getattr(command, "commands", {}).values()))


def test_names_of_decisions_are_in_their_files():
    rules = re.findall(r"`(\w+)` of `([\w/]+\.py)`", (ROOT / "docs" / "decisions.md").read_text())
    assert len(rules) > 10
    assert [rule for rule in rules if not re.search(rf"\b{rule[0]}\b", (ROOT / rule[1]).read_text())] == []


def test_every_rule_of_decisions_has_a_figure():
    rules = (ROOT / "docs" / "decisions.md").read_text().partition("## Choices of structure")[0]
    figures = [
        line.split(" | ")[2] for line in rules.splitlines() if line.startswith("| ") and "| figure |" not in line
    ]
    assert len(figures) > 20
    assert [figure for figure in figures if not re.search(r"\d", figure)] == []


def test_every_fence_is_found_and_its_language_is_known():
    known = {"", "c", "console", "diff", "py", "python", "sh", "bash", "yaml"}
    for page in PAGES:
        found = list(blocks(page))
        assert page.read_text().count("```") == 2 * len(found), f"{page.name}: a fence that `blocks` does not find"
        assert {block.language for block in found} <= known, page.name


def test_the_tests_that_run_a_page_name_it():
    for page, test in RUN_ELSEWHERE.items():
        assert ("TUTORIALS" if page in TUTORIALS else page.name) in (ROOT / test).read_text(), f"{test}: {page.name}"


PYTHON = [block for page in PAGES for block in blocks(page) if block.language in ("python", "py")]
# Blocks of `py` name a checkpoint or packages of others.
COMPILED = [block for block in PYTHON if block.language == "py" or block.page in FRAGMENTS]
PROGRAMS = [block for block in PYTHON if block not in COMPILED and block.page not in RUN_ELSEWHERE]


@pytest.mark.parametrize("block", PROGRAMS, ids=where)
def test_a_program_runs(block, tmp_path, monkeypatch):
    """As it stands. A page that shows what is printed is one to follow."""
    assert "console" not in {other.language for other in blocks(block.page)}, "follow this page: documents.FOLLOWED"
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.chdir(tmp_path)
    logger = logging.getLogger("weft")  # docs/logging.md configures it
    monkeypatch.setattr(logger, "handlers", [*logger.handlers])
    level = logger.level
    (tmp_path / "program.py").write_text(block.text)
    try:
        run("python program.py")
    finally:
        logger.setLevel(level)


def test_all_pages_of_fragments_have_some():
    assert {block.page for block in COMPILED if block.language == "python"} == {*FRAGMENTS}


def test_the_page_of_transformers_begins_with_replace():
    first = next(blocks(ROOT / "docs" / "transformers.md"))
    assert "replace(model, team)" in first.text and "weft.launch(main)" in first.text


@pytest.mark.parametrize("block", COMPILED, ids=where)
def test_a_fragment_compiles_and_its_names_of_weft_exist(block):
    tree = ast.parse(re.sub(r",? …", "", block.text), filename=where(block))
    names = names_of_weft(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            object_of(node, names)


def names_of_weft(tree):
    """Names that imports of weft bind, with their objects; `weft` itself in any case."""
    names = {"weft": weft}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.partition(".")[0] == "weft":
                    module = importlib.import_module(alias.name)
                    names[alias.asname or "weft"] = module if alias.asname else weft
        elif isinstance(node, ast.ImportFrom) and node.module.partition(".")[0] == "weft":
            module = importlib.import_module(node.module)
            names |= {alias.asname or alias.name: getattr(module, alias.name) for alias in node.names}
    return names


def object_of(node, names):
    """Object of an expression such as `weft.ops.all_reduce`; None beyond modules. AttributeError if a module lacks it."""
    if isinstance(node, ast.Name):
        return names.get(node.id)
    module = object_of(node.value, names) if isinstance(node, ast.Attribute) else None
    return getattr(module, node.attr) if inspect.ismodule(module) else None
