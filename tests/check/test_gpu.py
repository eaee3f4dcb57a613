"""``weft check --gpu``: GSan's words, refusals, and findings beside the simulator's. The last mile needs a GPU."""

import fcntl
import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import triton
import triton.language as tl
from typer.testing import CliRunner

import weft.check
import weft.language as wl
from tests import spawning
from tests.compiling import a_view
from tests.limits import ANSWER, PROCESS
from tests.zoo import publishing
from tests.zoo.catalogue import EXHIBITS
from tests.zoo.on_gpus import declared, ended
from weft import triton_api
from weft.check.gpu import check as joining
from weft.check.gpu import comparison, runs
from weft.check.gpu.assertions import LIMITS, UNFOLLOWED, assertions, finding_of, findings, limits
from weft.check.report import Report
from weft.cli import app
from weft.errors import NoEnd, Unsupported
from weft.language.lowering import stock
from weft.runtime import launch
from weft.runtime.platforms import sanitized
from weft.runtime.platforms.cuda import CudaPlatform
from weft.runtime.platforms.sanitized import SanitizedPlatform
from weft.runtime.store import Given
from weft.runtime.team import team
from weft.simulator import front_end

KERNEL = publishing.__file__
ROOT = Path(__file__).parent.parent.parent
LOAD = 1 + Path(KERNEL).read_text().splitlines().index("        tl.store(got + at, tl.load(data + at))  # here")


def words(line, message="Read after write race detected", thread=0, block=0, file=KERNEL):
    """A device assertion as CUDA's driver writes it."""
    return f"{file}:{line}: : block: [{block},0,0], thread: [{thread},0,0] Assertion `{message}` failed.\n"


def a_run(*texts, error=None, seconds=None):
    said = tuple(one for rank, text in enumerate(texts) for one in assertions(text, rank))
    return runs.Run(said=said, error=error, seconds=seconds, errors=texts)


def case(name):
    return next(one for one in EXHIBITS if one.name == name)


def joined(report, run, plain=None):
    program = runs.Program(module="tests.zoo.publishing", function="tile_published_without_barrier", args=(True,))
    return joining.joined(program, (2,), report, lambda program, size: (run, plain), "a GPU")


def test_lines_of_one_assertion_are_one():
    text = "noise\n" + "".join(words(LOAD, thread=thread, block=3) for thread in range(32)) + words(LOAD + 1)
    first, second = assertions(text, 1)
    assert (first.rank, first.line, first.threads, first.program) == (1, LOAD, 32, 3)
    assert second.threads == 1 and second.line == LOAD + 1


@pytest.mark.parametrize(
    ("message", "verbs"),
    [
        ("Read after write race detected", ("store", "load")),
        ("Write after read race detected", ("load", "store")),
        ("Write after write race detected", ("store", "store")),
    ],
)
def test_a_race_in_words_of_weft(message, verbs):
    (finding,) = findings(assertions(words(LOAD, message), 1))
    assert (finding.kind, tuple(side.verb for side in finding.sides)) == ("race", verbs)
    place = finding.sides[1].place
    assert (place.line, place.function, place.text) == (
        LOAD,
        "publish_without_barrier",
        "tl.store(got + at, tl.load(data + at))  # here",
    )
    assert finding.sides[1].task == "rank 1 kernel publish_without_barrier program 0" and finding.sides[0].place is None


def test_assertions_that_are_no_races():
    (finding,) = findings(assertions(words(LOAD, UNFOLLOWED), 0))
    assert finding.kind == "unfollowed"
    (finding,) = findings(assertions(words(LOAD, "index out of range"), 0))
    assert finding.kind == "error" and "index out of range" in finding.message
    said = assertions("".join(words(LOAD, message) for message in LIMITS), 0)
    assert findings(said) == [] and len(limits(said)) == len(LIMITS) == len(said)


def test_a_primitive_is_named_by_what_it_does():
    lines = Path(stock.__file__).read_text().splitlines()
    line = next(number for number, text in enumerate(lines, 1) if "tl.atomic_xchg" in text)
    (said,) = assertions(words(line, "Write after write race detected", file=stock.__file__), 0)
    assert finding_of(said).sides[1].verb == "notify"


def test_the_simulator_and_gsan_have_one_finding_each():
    bug = case("release_that_is_relaxed")
    simulated = weft.check.check(bug.main, 2, schedules=4, args=(True,))
    assert [entry.finding.kind for entry in simulated.wrong] == ["relaxed-order"]
    line = max(bug.lines)
    report = joined(simulated, a_run("", words(line)))
    assert len(report.wrong) == 1 and not report.ok
    assert f"shown by GSan on 2 ranks of a GPU: load by rank 1, publishing.py:{line}" in str(report)
    assert "1 finding(s), all of which the simulator has" in report.summary


def test_what_gsan_alone_has_is_a_finding():
    report = joined(Report(findings=(), schedules=4, world_sizes=(2,), script="push.py"), a_run("", words(LOAD)))
    (entry,) = report.wrong
    assert entry.finding.kind == "race" and "weft check push.py --gpu --world-size 2" in str(report)
    assert "1 of which the simulator lacks" in report.summary
    assert '"notes"' in report.to_json()


def test_a_marker_allows_a_race_of_gsan(tmp_path):
    (kernel := tmp_path / "kernel.py").write_text("x\ntl.store(best, mine)  # weft: allow(race) any value will do\n")
    report = joined(
        Report(findings=(), schedules=4, world_sizes=(2,)),
        a_run(words(2, "Write after write race detected", file=str(kernel))),
    )
    assert report.ok and "allowed: race at kernel.py:2: any value will do" in report.summary


def test_what_the_simulator_alone_has_comes_with_the_reason():
    bug = case("tile_published_without_barrier")
    simulated = weft.check.check(bug.main, 2, schedules=4, args=(True,))
    report = joined(simulated, a_run("", ""), None)
    assert "not shown by GSan: missing-barrier data" in report.summary
    assert comparison.UNMODELLED["missing-barrier"] in report.summary


def test_a_clean_run_prints_the_slowdown():
    clean = Report(findings=(), schedules=4, world_sizes=(2, 3))
    report = joined(clean, a_run("", "", seconds=0.5), a_run("", "", seconds=0.01))
    assert report.ok and "no race; main takes 50 times as long as without GSan" in report.summary


def test_ends_of_a_run_that_are_no_race():
    clean = Report(findings=(), schedules=4, world_sizes=(2,))
    assert [entry.finding.kind for entry in joined(clean, a_run("", error=NoEnd(2, 60))).wrong] == ["deadlock"]
    assert [entry.finding.kind for entry in joined(clean, a_run("", error=AssertionError("no"))).wrong] == ["error"]
    overflow = a_run(words(LOAD, "Vector clock overflowed"), error=RuntimeError("device-side assert triggered"))
    assert "more than 65,535 releases" in joined(clean, overflow).summary and joined(clean, overflow).ok
    with pytest.raises(Unsupported, match="sub-team"):
        joined(clean, a_run("", error=Unsupported("a sub-team")))


def test_the_reason_of_each_difference():
    kinds = {"race": case("release_of_gpu_scope"), "undrained-tma": case("signal_overtakes_descriptor_store")}
    for exhibit in kinds.values():
        said, alike = ended(exhibit, a_run("", ""), True)
        assert said.startswith("no race: ") and alike
        assert ended(exhibit, a_run("", ""), False) == ("clean", True)
    said, alike = ended(kinds["race"], a_run("", words(1)), True)
    assert said.startswith("race at publishing.py:1") and not alike
    inside = f"{comparison._LANGUAGE}/lowering/stock.py"
    assert ended(kinds["race"], a_run("", words(30, file=inside)), True)[1]
    assert declared(kinds["race"]).finding.kind == "scope"


@pytest.fixture
def without_gpus(monkeypatch):
    """`launch_watched` in processes that have no GPU."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(launch, "_on_gpu", spawning.Alone)


def test_a_run_that_does_not_end_is_killed(without_gpus, tmp_path):
    with pytest.raises(NoEnd, match="2 ranks did not end within 3 s"):
        launch.launch_watched(spawning.say_and_wait, 2, args=(1000.0,), errors=str(tmp_path), seconds=3)


def test_standard_error_of_each_rank_is_kept(without_gpus, tmp_path):
    ended = launch.launch_watched(spawning.say_and_wait, 2, args=(0.0,), errors=str(tmp_path), seconds=ANSWER)
    assert ended == [0, 1]
    assert [f"from rank {rank}" in (tmp_path / f"rank{rank}").read_text() for rank in ended] == [True, True]


def test_a_sanitized_run_takes_heaps_of_gsan(monkeypatch):
    assert team._platform_of_this_process() is CudaPlatform
    monkeypatch.setattr(team, "given", lambda: Given("folder", b"secret", sanitized=True))
    assert team._platform_of_this_process() is SanitizedPlatform


def test_gsan_learns_the_order_of_a_barrier_of_hosts(monkeypatch):
    platform, barriers = SanitizedPlatform.__new__(SanitizedPlatform), []
    monkeypatch.setattr(CudaPlatform, "exchange", lambda self, what, item: [item, item])
    platform._handle, platform.rank = SimpleNamespace(barrier=lambda: barriers.append(1)), 0
    assert platform.exchange("init", 3) == [3, 3] and not barriers
    assert platform.exchange("barrier", None) == [None, None] and len(barriers) == 1
    platform.caps = SimpleNamespace(sms=132)
    assert platform.max_programs(4, 255) == 132
    for refused in (lambda: platform.subset([0], 1), lambda: platform.rail_over([0]), lambda: platform._make_node(1)):
        with pytest.raises(Unsupported, match="leave --gpu out"):
            refused()


def test_one_rank_compiles_at_a_time(monkeypatch, tmp_path):
    made = SimpleNamespace(compilation=SimpleNamespace(), runtime=SimpleNamespace())
    monkeypatch.setattr(sanitized, "knobs", made)
    sanitized.instrument(str(tmp_path))
    assert made.compilation.instrumentation_mode == "gsan"

    def is_free():
        with open(tmp_path / "compiling") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
            return True

    assert not made.runtime.jit_cache_hook(key="of a kernel", repr="") and not is_free()
    made.runtime.jit_post_compile_hook(key="of a kernel", repr="")
    assert is_free()


@triton.jit
def primitives(words, signals, out, team, N: tl.constexpr):
    at = tl.arange(0, N)
    wl.lamport_store(wl.symm_at(words, 1, team) + at, at.to(tl.float32), at < N)
    tl.store(out + at, wl.lamport_load(words + at, at < N, team))
    wl.notify(signals, 1, 3, team)
    wl.wait(signals, 3, team)
    wl.wait_all(signals, 4, 3, team)


def triton_ir(kernel, signature, constants, mode):
    """Triton IR of a kernel for sm_90, instrumented as ``mode`` says."""
    properties = SimpleNamespace(get_device_properties=lambda device: {"max_shared_mem": 232448})
    stub = SimpleNamespace(get_current_target=lambda: front_end.TARGET, get_current_device=lambda: 0, utils=properties)
    backend = triton_api.make_backend(front_end.TARGET)
    context = triton_api.ir.context()
    triton_api.ir.load_dialects(context)
    backend.load_dialects(context)
    before = triton_api.driver._active
    triton_api.driver.set_active(stub)
    try:
        options = backend.parse_options({"instrumentation_mode": mode})
        functions, modules = backend.get_codegen_implementation(options), backend.get_module_map()
        source = triton_api.ASTSource(kernel, signature, constants)
        return str(source.make_ir(front_end.TARGET, options, functions, modules, context))
    finally:
        triton_api.driver._active = before


def test_gsan_sees_signals_and_does_not_see_lamport_words():
    pytest.importorskip("triton.experimental.gsan")
    binder = triton_api.create_function_from_signature(
        primitives.signature, primitives.params, triton_api.make_backend(front_end.TARGET)
    )
    words, signals = torch.zeros(32), torch.zeros(4, dtype=torch.int32)
    bound, specialisation, _ = binder(words, signals, words, a_view(), 32)
    kinds = [kind for kind, _ in specialisation]
    paths = triton_api.find_paths_if(kinds, lambda _, kind: kind == "constexpr")
    constants = {path: front_end._at(list(bound.values()), path) for path in paths}
    signature = dict(zip(bound, kinds, strict=True))
    plain, seen = (triton_ir(primitives, signature, constants, mode) for mode in ("", "gsan"))
    assert "st.release.sys" in plain and "tt.atomic_load" not in plain and "st.volatile" not in plain
    assert "st.release.sys" not in seen and "tt.atomic_load" in seen and "st.volatile" in seen and "ld.volatile" in seen


@pytest.mark.gpu(1)
@pytest.mark.parametrize("bug", [True, False])
def test_gpu_gsan_shows_the_race_and_no_race_of_the_twin(bug):
    pytest.importorskip("triton.experimental.gsan")
    exhibit = case("release_that_is_relaxed")
    program = runs.Program(module=publishing.__name__, function=exhibit.name, args=(bug,))
    done = runs.run(program, 2, sanitized=True, seconds=PROCESS, twice=False)
    lines = {finding.sides[-1].line for finding in joining.found_by(done)}
    assert lines <= exhibit.lines and bool(lines) == bug, done.errors


def test_the_races_that_gsan_has_shown_are_the_simulator_s():
    """Recorded lines of benchmarks/results/check/gsan.json."""
    recorded = json.loads((ROOT / "benchmarks" / "results" / "check" / "gsan.json").read_text())["rows"]
    exhibits = {f"{one.main.__module__.rpartition('.')[2]}.{one.name}": one for one in EXHIBITS}
    races = [row for row in recorded if row["bug"].startswith("race at ")]
    for row in races:
        exhibit = exhibits[row["name"]]
        texts = [
            words(int(line), file=exhibit.main.__code__.co_filename if "stock" not in file else stock.__file__)
            for file, line in re.findall(r"(\w+\.py):(\d+)", row["bug"])
        ]
        assert ended(exhibit, a_run("".join(texts)), True)[1], row
    assert len(races) == 39 and sum(row["twin"] == "clean" for row in recorded) == 109


def test_refusals_are_one_line(monkeypatch, tmp_path):
    script = tmp_path / "push.py"
    script.write_text("def main(team):\n    pass\n")

    def refused(*flags):
        done = CliRunner().invoke(app, ["check", str(script), "--gpu", *flags])
        assert done.exit_code == 2 and len(done.output.strip().splitlines()) == 1, done.output
        return done.output

    assert "--torch" in refused("--torch")
    assert "--node-size" in refused("--node-size", "1")
    assert "--gpu-seconds" in refused("--gpu-seconds", "0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "finds no GPU" in refused()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)

    def lacking():
        raise ImportError

    monkeypatch.setattr(runs.triton_api, "gsan", lacking)
    assert f"this is Triton {triton.__version__}" in refused()
