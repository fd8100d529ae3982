"""Kernels that end their process, crash it or hang, outside of a server: the run goes on without a result, and nothing is left."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from io import StringIO
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from rich.console import Console

from assay.harness.attention.bugs.faults import rounded_oracle
from assay.harness.attention.sample_calls import call_of
from assay.harness.config import RunSpec
from assay.harness.engines.inside.pack_writer import PackWriter
from assay.harness.evidence.folder import RunFolder
from assay.harness.evidence.kernel_result import CAUSE, MATRIX, KernelResult
from assay.harness.evidence.layer_diff_record import PACK_FOLDER
from assay.harness.evidence.pack import Source
from assay.harness.judge.build import build
from assay.harness.localize.causes import OUTPUT_NOT_WRITTEN
from assay.harness.progress import ProgressDisplay
from assay.harness.run.collect import _kernel_aside, collect
from assay.harness.run.kernel_process import LOG, examine_kernel
from assay.harness.run.plan import Plan, prepare
from assay.harness.run.run_folder import open_folder
from tests.harness.engines.wheels import wheel

RECORDED = 7
"""Layer of the recorded calls; those of the matrix are of layer 0."""
KERNELS = f"""
import os, time
from assay.harness.attention.bugs.faults import rounded_oracle

def right(call):
    print("\\x1b[31m", flush=True)
    return rounded_oracle(call)

def exits(call):
    os._exit(0)

def decode_raises(call):
    if call.phase == "decode":
        raise ValueError("no decode today")
    return rounded_oracle(call)

def one_call_raises(call):
    if call.k.shape[0] == 2:
        raise ValueError("not two keys")
    return rounded_oracle(call)

def hangs_on_the_matrix(call):
    if call.layer != {RECORDED}:
        print("hanging", flush=True)
        time.sleep(600)
    return rounded_oracle(call)

def wrong(call):
    return rounded_oracle(call.with_spec(scale=call.scale**2))

def hangs_when_it_is_read(call):
    if call.layer not in (0, {RECORDED}):
        time.sleep(600)
    return 0 * rounded_oracle(call)

def exits_when_it_is_read(call):
    if call.layer not in (0, {RECORDED}):
        os._exit(0)
    return 0 * rounded_oracle(call)

def of_its_environment(call):
    try:
        from fact import VALUE
    except ImportError:
        VALUE = int(os.environ.get("SGLANG_FACT", "1"))
    return int(VALUE) * rounded_oracle(call)

def hangs_on_recorded_calls(call):
    if call.layer == {RECORDED}:
        time.sleep(600)
    return 0 * rounded_oracle(call)
"""


Opened = tuple[Plan, RunFolder]


@pytest.fixture
def opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Opened]:
    """A function of a kernel's name that makes a run whose candidate it is, with recorded calls."""
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    (tmp_path / "isolated_kernels.py").write_text(KERNELS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))

    def make(kernel: str, **spec: Any) -> Opened:
        candidate = f"isolated_kernels:{kernel}"
        asked = {"reference": "torch_native", "candidate": candidate, "suites": ("layers",), "envelope_tokens": 128, **spec}
        plan = prepare(RunSpec.of(**asked))
        folder = open_folder(plan, Path("run"))
        source = Source(engine="e", model="m", model_hash="", reference="torch_native", candidate=candidate, run=folder.nonce)
        writer = PackWriter(folder.server_folder("reference") / PACK_FOLDER, source, 10**7)
        for new, prefix in ((3, 0), (4, 20)):
            call = call_of([(new, prefix)], (2, 1), 8, torch.float32, "cpu").with_spec(layer=RECORDED)
            is_wrong = kernel == "hangs_on_recorded_calls" or kernel.endswith("_when_it_is_read")
            out = (0 if is_wrong else 1) * rounded_oracle(call)
            out = rounded_oracle(call.with_spec(scale=call.scale**2)) if kernel == "wrong" else out
            writer.add(call, rounded_oracle(call), candidate=out)
        writer.flush()
        return plan, folder

    return make


LEFT: list[Callable[[], list[psutil.Process]]] = []


def quiet() -> ProgressDisplay:
    return ProgressDisplay(Console(file=StringIO()))


def results(folder: RunFolder) -> tuple[KernelResult, KernelResult]:
    cause, matrix = folder.read(CAUSE), folder.read(MATRIX)
    assert cause is not None
    assert matrix is not None
    return cause, matrix


@pytest.fixture(autouse=True)
def _left(left_processes: Callable[[], list[psutil.Process]]) -> None:
    LEFT[:] = [left_processes]


def assert_nothing_left(folder: RunFolder) -> None:
    assert LEFT[0]() == []
    assert list(Path(tempfile.gettempdir()).iterdir()) == []
    assert {path.name for path in folder.path.iterdir()} <= {
        "manifest.json", "items.jsonl", "servers", ".lock", "cause.json", "matrix.json", LOG, "progress.json",
    }  # fmt: skip


def test_a_kernel_is_examined_in_a_process_of_its_own(opened: Callable[..., Opened]) -> None:
    plan, folder = opened("right")
    examine_kernel(plan, folder, quiet())
    cause, matrix = results(folder)
    assert (cause.kernel, cause.calls, cause.findings, cause.not_run) == ("isolated_kernels:right", 4, (), "")
    assert cause.not_tested == ("only 2 calls were tested for nondeterminism, state and overwritten inputs",)
    assert (matrix.kernel, matrix.failing, matrix.not_run) == ("isolated_kernels:right", (), "")
    assert matrix.computed > 30
    assert "\x1b[31m" in (folder.path / LOG).read_text(), "what it prints goes to a log"
    assert_nothing_left(folder)
    before = (folder.path / "matrix.json").read_bytes()
    examine_kernel(plan, folder, quiet())
    assert (folder.path / "matrix.json").read_bytes() == before, "nothing is done twice"


@pytest.mark.slow  # fast: test_a_kernel_is_examined_in_a_process_of_its_own
@pytest.mark.parametrize(
    ("setting", "wrong"),
    [
        ({}, False),
        ({"candidate_env": ("SGLANG_FACT=0",)}, True),
        pytest.param({"candidate_env": ("SGLANG_FACT=1",)}, False, marks=pytest.mark.slow),
        pytest.param({"candidate_with": ("fact-1.0-py3-none-any.whl",)}, True, marks=pytest.mark.slow),
    ],
)
def test_recorded_calls_are_computed_in_the_environment_of_the_candidate(
    opened: Callable[..., Opened], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, setting: Any, wrong: bool
) -> None:
    """A shadow in the reference's server had recorded right outputs, since that has another version of the package."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    wheel(tmp_path, "1.0", "0")
    plan, folder = opened("of_its_environment", suites=("layers", "greedy"), **setting)
    examine_kernel(plan, folder, quiet())
    cause, _ = results(folder)
    assert ([finding.id for finding in cause.findings], cause.not_run) == ([OUTPUT_NOT_WRITTEN] if wrong else [], "")
    assert cause.kernel == "isolated_kernels:of_its_environment"
    if wrong:  # `assay replay` would not run there
        assert cause.findings[0].reproduce == folder.manifest().command


class ServersStartError(Exception):
    pass


@pytest.mark.parametrize(
    ("kernel", "says"),
    [
        ("decode_raises", "the kernel raised ValueError: no decode today (isolated_kernels.py, line "),
        pytest.param("exits", "the kernel's process exited with status 0 in a call (layer 0 extend, ", marks=pytest.mark.slow),
        pytest.param("one_call_raises", "", marks=pytest.mark.slow),
    ],
)
def test_a_kernel_that_can_serve_nothing_ends_a_run_before_its_servers_start(
    opened: Callable[..., Opened], monkeypatch: pytest.MonkeyPatch, kernel: str, says: str
) -> None:
    def start(*_: object) -> None:
        raise ServersStartError

    monkeypatch.setattr("assay.harness.run.collect.running", start)
    plan, folder = opened(kernel)
    if not says:
        with pytest.raises(ServersStartError):
            collect(plan, folder, quiet())
        return
    collect(plan, folder, quiet())
    failure = folder.progress().failure
    assert failure is not None
    assert failure.found.startswith(f"No server was started: {says}")
    assert f"assay check isolated_kernels:{kernel}" in failure.do
    assert build(folder).verdict == "error"
    assert_nothing_left(folder)


def test_a_kernel_that_exits_leaves_a_report_that_is_no_pass(opened: Callable[..., Opened]) -> None:
    plan, folder = opened("exits")
    examine_kernel(plan, folder, quiet())
    cause, matrix = results(folder)
    assert cause.not_run.startswith("the kernel's process exited with status 0 in a call (layer 7 extend, new+prefix ")
    assert "expected an output or an exception" in cause.not_run
    assert "run assay check isolated_kernels:exits" in matrix.not_run
    assert cause.calls == 2, "the recorded outputs were examined all the same"
    assert_nothing_left(folder)
    report = build(folder)
    assert report.verdict not in ("pass", "regression")
    (suite,) = [suite for suite in report.suites if suite.id == "matrix"]
    (check,) = [check for check in report.checks if check.id == "matrix-ran"]
    assert (suite.verdict, check.status) == ("inconclusive", "missing")
    assert "the kernel's process exited with status 0" in suite.why[0].values["missing"][0]


@pytest.mark.slow
def test_a_kernel_that_hangs_on_recorded_calls_is_named_by_their_outputs_and_runs_on_the_matrix(
    opened: Callable[..., Opened],
) -> None:
    plan, folder = opened("hangs_on_recorded_calls", request_timeout=2)
    examine_kernel(plan, folder, quiet())
    cause, matrix = results(folder)
    assert cause.not_run.startswith("the kernel did not return from a call within 2 s (layer 7 extend, ")
    assert [finding.id for finding in cause.findings] == [OUTPUT_NOT_WRITTEN]
    assert OUTPUT_NOT_WRITTEN in [finding.id for finding in matrix.findings], matrix
    assert_nothing_left(folder)


@pytest.mark.slow
def test_a_kernel_with_a_known_bug_is_tried_and_read_once(opened: Callable[..., Opened]) -> None:
    plan, folder = opened("wrong")
    examine_kernel(plan, folder, quiet())
    cause, matrix = results(folder)
    for result, is_read in ((cause, True), (matrix, False)):
        finding = result.findings[0]
        assert (finding.id, finding.operator != "", result.tried is not None) == ("scale-twice", is_read, is_read)
    assert_nothing_left(folder)
    assert build(folder).suites, "the report reads them"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kernel", "why"),
    [
        ("hangs_when_it_is_read", "the kernel did not return from a call within 2 s (layer "),
        ("exits_when_it_is_read", "the kernel's process exited with status 0 in a call (layer "),
    ],
)
def test_a_kernel_that_does_not_survive_being_read_keeps_its_findings(opened: Callable[..., Opened], kernel: str, why: str) -> None:
    plan, folder = opened(kernel, request_timeout=2)
    examine_kernel(plan, folder, quiet())
    cause, matrix = results(folder)
    assert (cause.not_run, matrix.not_run) == ("", "")
    for finding in (cause.findings[0], matrix.findings[0]):
        assert (finding.id, finding.operator) == (OUTPUT_NOT_WRITTEN, "")
        assert finding.evidence[-1].startswith(f"asked for more, {why}")
    assert matrix.failing
    assert_nothing_left(folder)


BUSY_S = 180
"""Seconds that steps may take which take five on an idle machine; thirty were seen on a busy one."""


def wait_until_it_hangs(folder: RunFolder) -> None:
    """Until the kernel hangs, and the result before is on the disk: a run that is killed while it writes leaves half a file."""
    deadline, log = time.monotonic() + BUSY_S, folder.path / LOG
    while not (log.exists() and "hanging" in log.read_text() and folder.read(CAUSE)):
        assert time.monotonic() < deadline, "the kernel does not hang, or the result before is not written"
        time.sleep(0.05)


def test_ctrl_c_does_not_wait_for_the_kernel(opened: Callable[..., Opened]) -> None:
    plan, folder = opened("hangs_on_the_matrix", device="cpu")
    begun: list[float] = []

    def score() -> None:
        with _kernel_aside(plan, folder, quiet()):
            wait_until_it_hangs(folder)
            begun.append(time.monotonic())
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        score()
    assert time.monotonic() - begun[0] < 60
    assert folder.read(MATRIX) is None
    assert folder.read(CAUSE) is not None
    assert_nothing_left(folder)
