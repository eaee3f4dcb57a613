"""Report as SARIF 2.1.0, the format in which code scanning takes findings of tools."""

from __future__ import annotations

import json
import os
import shlex
from importlib.metadata import version
from pathlib import Path
from typing import Any
from urllib.parse import quote

from weft.check.detector.findings import REMEDIES
from weft.check.explanations import EXPLANATIONS
from weft.check.report import Found, Report

_SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"


def sarif(report: Report) -> str:
    """SARIF text of a report. Findings that a marker allows are suppressed results."""
    kinds = list(dict.fromkeys(entry.finding.kind for entry in report.findings))
    rules = [
        {
            "id": kind, "shortDescription": {"text": EXPLANATIONS[kind].what}, "help": {"text": REMEDIES[kind]},
            "defaultConfiguration": {"level": "error"},
        }
        for kind in kinds
    ]  # fmt: skip
    driver = {"name": "weft check", "version": version("weft"), "rules": rules}
    run = {"tool": {"driver": driver}, "results": [_result(entry, report.script) for entry in report.findings]}
    return json.dumps({"version": "2.1.0", "$schema": _SCHEMA, "runs": [run]}, indent=2)


def _result(entry: Found, script: str) -> dict[str, Any]:
    finding = entry.finding
    text = f"{finding.head}: {finding.message}. Remedy: {finding.remedy}. Replay: {entry.replay.command(script)}"
    placed = [side for side in finding.sides if side.place is not None]
    result: dict[str, Any] = {
        "ruleId": finding.kind, "level": "error", "message": {"text": text},
        # Code scanning refuses a whole report for one result without a location.
        "locations": [_location(side.place.file, side.place.line) for side in placed[-1:]] or _at_script(script),
        "relatedLocations": [
            _location(side.place.file, side.place.line) | {"message": {"text": f"{side.verb} by {side.task}"}}
            for side in placed[:-1]
        ],
        "partialFingerprints": {"cause/v1": " ".join(map(str, finding.cause))},
    }  # fmt: skip
    if finding.allowed is not None:
        result["suppressions"] = [{"kind": "inSource", "justification": finding.allowed}]
    return result


def _at_script(script: str) -> list[dict[str, Any]]:
    """First line of the checked script, or of the test's file; nothing for a check from Python."""
    words = shlex.split(script.partition("::")[0])
    return [_location(words[0], 1)] if words else []


def _location(file: str, line: int) -> dict[str, Any]:
    path = os.path.relpath(file)
    uri = Path(file).resolve().as_uri() if path.startswith("..") else quote(Path(path).as_posix())
    return {"physicalLocation": {"artifactLocation": {"uri": uri}, "region": {"startLine": line}}}
