"""All workloads by name, the check of words for their providers, and the reports of files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from weft.arguments import did_you_mean
from weft.bench.harness.baselines import WITHOUT, folder_of
from weft.bench.harness.provider import named_by
from weft.bench.harness.report import SCHEMA, Report, from_json
from weft.bench.harness.workload import Workload
from weft.bench.models.names import is_model
from weft.bench.names import MEASURED, TRAIN
from weft.bench.ops.providers import providers_for
from weft.bench.ops.shapes import FORMS, OPS, op_of
from weft.bench.ops.workload import OpWorkload
from weft.bench.training.shapes import LayerShape
from weft.bench.training.workload import TrainWorkload


def check_words(workloads: Sequence[Workload], words: Sequence[str]) -> None:
    """Check that each word names a provider, and that each workload has one to measure.

    Known are the providers of ``workloads`` and of all ops. Else ValueError, with what the workloads have.
    """
    baselines = workloads[0].baselines
    known = {provider.name for op in OPS for provider in providers_for(op, baselines)}
    known |= {provider.name for workload in workloads for provider in workload.available()}
    for word in words:
        if not any(named_by(word, name) for name in known):
            each = (f"{one.name} has {', '.join(p.name for p in one.available())}" for one in workloads)
            near = did_you_mean(word, known) or (f"; {WITHOUT}" if folder_of(baselines) is None else "")
            raise ValueError(f"provider {word!r} is unknown; {'; '.join(each)}{near}")
    for workload in workloads:
        workload.providers()


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
            if report.op not in MEASURED:
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
