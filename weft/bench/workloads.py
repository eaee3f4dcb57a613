"""All workloads by name, and the reports of files with those that they belong to."""

from __future__ import annotations

from pathlib import Path

from weft.bench.harness.report import SCHEMA, Report, from_json
from weft.bench.harness.workload import Workload
from weft.bench.models.names import LEVELS, is_model
from weft.bench.names import VARIED
from weft.bench.ops.shapes import FORMS, OPS, op_of
from weft.bench.ops.workload import OpWorkload
from weft.bench.training.shapes import TRAIN, LayerShape
from weft.bench.training.workload import TrainWorkload

NAMES = (*OPS, *VARIED, *LEVELS, TRAIN)


def workload_of(report: Report) -> Workload:
    """The workload that a report measured, for its traffic. ValueError if there is none."""
    if report.op == TRAIN:
        return TrainWorkload(name=report.op, shapes=(), dtype=report.dtype)
    if not is_model(report.op):
        return OpWorkload(name=report.op, shapes=(), dtype=report.dtype)
    from weft.bench.models.workload import ModelWorkload  # it loads the models and the engine

    return ModelWorkload.of_subject(report.op, report.subject, report.dtype)


def read(path: Path) -> list[Report]:
    """Reports of a results file. ValueError, with the file's name, for unknown schemas, ops and shapes."""
    try:
        reports = from_json(path.read_text())
        for report in reports:
            if report.op not in NAMES:
                raise ValueError(f"op {report.op!r} is unknown")
            if report.op == TRAIN:
                dimensions = len(LayerShape._fields)
            else:
                dimensions = 3 if is_model(report.op) else FORMS[op_of(report.op).form].dimensions
            if any(len(row.shape) != dimensions for row in report.rows):
                raise ValueError(f"a shape does not fit {report.op}")
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ValueError(f"{path}: not a results file of schema {SCHEMA}: {error}") from error
    return reports
