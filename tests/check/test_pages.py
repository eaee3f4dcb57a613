"""Pictures of races, pages, SARIF and explanations: what a report can be written as."""

import json
from html.parser import HTMLParser

import pytest

import weft.check
from tests.check import examples
from tests.check.test_command import run
from tests.zoo import dated
from weft.check.detector.findings import RACES, REMEDIES, Finding
from weft.check.explanations import EXPLANATIONS, explain
from weft.check.page import page
from weft.check.picture import picture
from weft.check.report import Found, Report, Schedule
from weft.check.sarif import sarif


@pytest.fixture(scope="module")
def report():
    return weft.check.check(examples.racy, 2, schedules=2, script="racy & more.py")


def test_a_picture_has_both_sides_and_the_missing_arrow(report):
    (found,) = report.wrong
    rows = picture(found.finding)
    assert rows[0].split() == [
        "rank", "0", "kernel", "publish", "program", "0", "rank", "1", "kernel", "publish", "program", "0",
    ]  # fmt: skip
    store, release, load = (
        next(i for i, row in enumerate(rows) if text in row) for text in ("* store", "o atomic xchg", "* load")
    )
    assert store < release < load and "no order" in rows[load] and "> o waited for landed[0]" in rows[release]
    assert "\n".join(f"     {row}" for row in rows) in report.text(pictures=True)
    assert "no order" not in str(report)


def test_a_picture_is_of_two_accesses():
    report = weft.check.check(dated.poll_without_a_time_limit, 2, schedules=1, args=(True,))
    assert [found.finding.kind for found in report.wrong] == ["deadlock"]
    assert [picture(found.finding) for found in report.wrong] == [[]]


def test_a_page_is_one_file_with_a_drawing(report):
    class Parser(HTMLParser):
        tags: list = []

        def handle_starttag(self, tag, attributes):
            self.tags.append((tag, dict(attributes)))

    text, parser = page(report), Parser()
    parser.feed(text)
    tags = [tag for tag, _ in parser.tags]
    assert tags.count("svg") == 1 and tags.count("circle") == 5 and "no order" in text
    assert not {"script", "link", "img"} & set(tags) and "racy &amp; more.py" in text
    assert "No findings." in page(weft.check.check(examples.main, 2, schedules=1))


def test_sarif_names_rule_line_and_other_side(report):
    (run_,) = json.loads(sarif(report))["runs"]
    (rule,), (result,) = run_["tool"]["driver"]["rules"], run_["results"]
    assert rule["id"] == result["ruleId"] == "missing-barrier" and rule["help"]["text"] == REMEDIES["missing-barrier"]
    lines = [
        one["physicalLocation"]["region"]["startLine"] for one in (*result["locations"], *result["relatedLocations"])
    ]
    assert lines == [21, 14]
    assert result["locations"][0]["physicalLocation"]["artifactLocation"]["uri"].endswith("tests/check/examples.py")
    assert "Remedy: put tl.debug_barrier()" in result["message"]["text"]


def test_sarif_names_a_place_for_every_finding_and_quotes_it():
    replay = Schedule(world_size=2, strategy="uniform", seed=0)
    nowhere = Found(finding=Finding(kind="unfollowed", message=""), count=1, schedules=1, replay=replay)
    report = Report(findings=(nowhere,), schedules=1, world_sizes=(2,), script="'kernels/mä n.py' --torch")
    (result,) = json.loads(sarif(report))["runs"][0]["results"]
    (place,) = result["locations"]
    assert place["physicalLocation"]["artifactLocation"]["uri"] == "kernels/m%C3%A4%20n.py"


def test_the_command_writes_them(tmp_path):
    files = {name: tmp_path / f"report.{name}" for name in ("html", "sarif", "json")}
    flags = [part for name, file in files.items() for part in (f"--{name}", file)]
    result = run(examples.__file__, "--function", "racy", "--schedules", 1, *flags)
    assert result.exit_code == 1 and "no order" in result.output
    assert all(file.read_text().strip() for file in files.values())


@pytest.mark.parametrize("kind", REMEDIES)
def test_every_kind_is_explained(kind):
    text = explain(kind)
    assert text.startswith(f"{kind}: ") and "wrong:\n" in text and "mended:\n" in text and REMEDIES[kind] in text
    assert EXPLANATIONS[kind].wrong != EXPLANATIONS[kind].mended


def test_explanations_at_the_command_line():
    result = run("--explain", "scope")
    assert result.exit_code == 0 and result.output.startswith("scope: ")
    result = run("--explain", "scoop")
    assert result.exit_code == 2 and "did you mean" in result.output.lower() + str(result.stderr).lower()
    assert run().exit_code == 2
    assert set(EXPLANATIONS) == set(REMEDIES) >= RACES
