"""Links, paths and commands of the documents: each leads somewhere, names what exists, and is understood."""

import re
import shlex
import subprocess
from collections.abc import Iterator

import pytest
import typer

from tests.documents import PAGES, ROOT, blocks, commands
from weft.cli import app

# Files and commands in the others are of the past, or of the commits that were measured.
PAST = (ROOT / "docs" / "renames.md", ROOT / "docs" / "performance.md", *(ROOT / "docs" / "performance").glob("*.md"))
NOW = [page for page in PAGES if page not in PAST]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
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


@pytest.mark.parametrize("page", NOW, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_files_that_are_named_exist(page):
    own = {found for block in blocks(page) for found in re.findall(r"^# ([\w/]+\.py)$", block.text, flags=re.MULTILINE)}
    named = set(re.findall(r"(?<![\w/.])(?:weft|tests|benchmarks|scripts)/[\w/.-]*\w", page.read_text()))
    assert sorted(name for name in named - own if not list(ROOT.glob(name)) and not list(ROOT.glob(f"{name}*"))) == []


def test_names_of_decisions_are_in_their_files():
    rules = re.findall(r"`(\w+)` of `([\w/]+\.py)`", (ROOT / "docs" / "decisions.md").read_text())
    assert len(rules) > 10
    assert [rule for rule in rules if not re.search(rf"\b{rule[0]}\b", (ROOT / rule[1]).read_text())] == []


def test_figures_of_decisions_are_in_the_files_that_their_rows_name():
    """Also in files of commits, where git has them."""
    columns: list[str] = []
    checked, missing = 0, []
    for line in (ROOT / "docs" / "decisions.md").read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        if "figure" in cells and len(cells) >= 4:
            columns = cells
        elif not line.startswith("| ") or "figure" in cells:
            columns = columns if line.startswith("|--") else []
        elif columns and (figure := cells[columns.index("figure")]) not in ("–", "below"):
            found = [float(number) for text in sources(cells) for number in re.findall(r"\d+(?:\.\d+)?", text)]
            shown = re.findall(r"(?<![\w.])\d+(?:\.\d+)?", figure.rpartition(":")[2].replace(",", ""))
            missing += (f"{figure}: {number}" for number in shown if found and not is_among(number, found))
            checked += bool(found)
    assert checked > 60
    assert missing == []


def sources(cells: list[str]) -> Iterator[str]:
    """Texts that a row's last cell names: linked files but scripts, tests, files of commits; or the code with a comment."""
    *_, code, last = cells
    paths = re.findall(r"\((?!http)([^)#\s]+)", last)
    yield from ((ROOT / "docs" / path).read_text().replace(",", "") for path in paths if not path.endswith(".py"))
    named = last + code if "comment" in last else last
    yield from ((ROOT / path).read_text() for path in re.findall(r"`((?:tests|weft)/[\w/]+\.py)`", named))
    for name, commit in re.findall(r"`([\w/.+-]+)@(\w+)`", last):
        shown = subprocess.run(["git", "show", f"{commit}:benchmarks/{name}"], cwd=ROOT, capture_output=True, text=True)
        if shown.returncode == 0:
            yield shown.stdout


def is_among(number: str, found: list[float]) -> bool:
    """True if ``number`` is one of those found, rounded to its digits, or a thousandth of one."""
    half = 0.5001 * 10.0 ** -len(number.partition(".")[2])
    return any(abs(one / scale - float(number)) <= half for one in found for scale in (1, 1000))


COMMANDS = sorted({command for page in NOW for command in commands(page, spans=True)})


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_is_understood(command):
    """By the parser of its program. Those of console blocks run as the page says (test_tutorials, test_adding_an_op)."""
    program, *arguments = shlex.split(command)
    if program == "torchrun":  # … -m weft SUBCOMMAND
        arguments = arguments[arguments.index("weft") + 1 :]
    if program == "make":
        targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
        assert arguments[0] in targets
    elif program.endswith("python"):
        script = arguments[1].replace(".", "/") + ".py" if arguments[0] == "-m" else arguments[0]
        assert (ROOT / script).is_file() or (ROOT / script).with_suffix("").is_dir() or arguments[0] == "-c"
    else:
        group = typer.main.get_command(app)
        with group.make_context("weft", arguments[:1], resilient_parsing=True) as context:
            name, subcommand, rest = group.resolve_command(context, arguments)
            subcommand.make_context(name, rest, parent=context)
