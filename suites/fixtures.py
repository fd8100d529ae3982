"""The fixtures and flags of ``pytest suites --reference … --candidate …``.

A run through pytest is the same run as ``assay run``: the same checks, evidence, reports and exit code, with one test per claim.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import pytest

from assay.harness.config import FIELDS, RUN_FLAGS, RunSpec, flag, make_spec
from assay.harness.errors import UsageError
from assay.harness.interruption import like_ctrl_c

if TYPE_CHECKING:
    from assay.harness.engines.base import Engine
    from assay.harness.judge.report import Report
    from assay.harness.progress import ProgressDisplay
    from assay.harness.run.run import OpenRun
    from assay.harness.sides import Role
    from assay.harness.workload import Workload

Made = TypeVar("Made")
_REPORT = pytest.StashKey["Report"]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the flags of ``assay run``, from the fields of `RunSpec`."""
    group = parser.getgroup("assay", "assay: what `pytest suites` compares")
    for name in RUN_FLAGS:
        field = FIELDS[name]
        action: Any = "append" if name == "engine_arg" else "store"
        group.addoption(flag(name), action=action, default=None, help=field.description, dest=f"assay_{name}")
    group.addoption("--out", type=Path, default=None, help="the run's folder", dest="assay_out")


def _or_exit(make: Callable[[], Made]) -> Made:
    """End the session with exit code 2 on a usage error, before anything was started."""
    try:
        return make()
    except UsageError as error:
        pytest.exit(f"assay: {error}", returncode=error.exit_code)


def _display() -> ProgressDisplay:
    from rich.console import Console

    from assay.harness.progress import ProgressDisplay

    return ProgressDisplay(Console(stderr=True))


@pytest.fixture(scope="session")
def spec(request: pytest.FixtureRequest) -> RunSpec:
    """Return the run that the flags and ``assay.toml`` describe."""
    flags = {name: request.config.getoption(f"assay_{name}") for name in RUN_FLAGS}
    if flags["engine_arg"] is not None:
        flags["engine_arg"] = tuple(flags["engine_arg"])
    return _or_exit(lambda: make_spec(flags))


@pytest.fixture(scope="session")
def workload(spec: RunSpec) -> Workload:
    """Return what the run asks."""
    return spec.workload


@pytest.fixture(scope="session")
def opened_run(spec: RunSpec, request: pytest.FixtureRequest) -> OpenRun:
    """Open the run, checked, with its folder."""
    from assay.harness.run.run import OpenRun

    out = request.config.getoption("assay_out")
    return _or_exit(lambda: OpenRun.open(spec, out, kept_running=True, display=_display()))


@pytest.fixture(scope="session")
def servers(opened_run: OpenRun, request: pytest.FixtureRequest) -> Iterator[Mapping[Role, Engine]]:
    """Start both servers side by side, and yield them by role. If one does not start, a report is written and no test runs."""
    with like_ctrl_c(), _display() as display, opened_run.servers(display) as engines:
        if not engines:
            from assay.reports.wording.verdict import headline, reasons

            failed = _write_report(opened_run, request.config)
            pytest.exit(f"assay: {headline(failed)} {reasons(failed)[0]}", returncode=failed.exit_code)
        yield engines


@pytest.fixture(scope="session")
def reference_server(servers: Mapping[Role, Engine]) -> Engine:
    """Return the running reference server."""
    return servers["reference"]


@pytest.fixture(scope="session")
def candidate_server(servers: Mapping[Role, Engine]) -> Engine:
    """Return the running candidate server."""
    return servers["candidate"]


@pytest.fixture(scope="session")
def report(opened_run: OpenRun, servers: Mapping[Role, Engine], request: pytest.FixtureRequest) -> Report:
    """Make the report of the complete run once, and write it to the run's folder; it decides the session's exit code."""
    try:
        with _display() as display:
            opened_run.collect(display, ready=list(servers.values()))
    finally:  # what was answered before an interruption still makes a report
        made = _write_report(opened_run, request.config)
    return made


def _write_report(opened: OpenRun, config: pytest.Config) -> Report:
    from assay.reports.write import write_reports

    made = opened.report()
    write_reports(made, opened.folder.path)
    config.stash[_REPORT] = made
    return made


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Exit with the run's code: pytest alone cannot tell a regression (1) from no verdict (3)."""
    if made := session.config.stash.get(_REPORT, None):
        session.exitstatus = made.exit_code


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Show the verdict below the tests."""
    if made := config.stash.get(_REPORT, None):
        from assay.reports.wording.verdict import headline, reasons

        terminalreporter.section(f"assay: {made.verdict}")
        terminalreporter.write_line(headline(made))
        for reason in reasons(made):
            terminalreporter.write_line(f"- {reason}")
