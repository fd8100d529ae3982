"""``pytest suites --reference … --candidate …``: the fixtures of a run, and its flags.

A run through pytest is the same run as ``assay run``: the same checks, evidence, reports and exit code, with one test a claim.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from assay.harness.bench.plan import BenchPlan
from assay.harness.bench.suite import plan_latency, time_servers
from assay.harness.collect.collect import collect
from assay.harness.collect.plan import Plan, prepare
from assay.harness.collect.run_folder import asked_roles, default_folder, open_folder, recorded
from assay.harness.collect.servers import make_run_engine, running
from assay.harness.config import FLAGS, RunSpec, make_spec
from assay.harness.engines.base import Engine
from assay.harness.errors import UsageError
from assay.harness.evidence.folder import RunFolder
from assay.harness.judge.build import build
from assay.harness.judge.report import Report
from assay.harness.progress import ProgressDisplay
from assay.reports.write import write_all

_REPORT = pytest.StashKey[Report]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """The flags of ``assay run``, from the fields of `RunSpec`."""
    group = parser.getgroup("assay", "assay: what `pytest suites` compares")
    for name in FLAGS:
        field = RunSpec.model_fields[name]
        flag = f"--{name.replace('_', '-')}"
        action: Any = "append" if name == "engine_arg" else "store"
        group.addoption(flag, action=action, default=None, help=field.description, dest=f"assay_{name}")
    group.addoption("--out", type=Path, default=None, help="the run's folder", dest="assay_out")


def _or_exit(make: Callable[[], Any]) -> Any:
    """Wrong use ends the session with exit code 2, before anything was started."""
    try:
        return make()
    except UsageError as error:
        pytest.exit(f"assay: {error}", returncode=error.exit_code)


@pytest.fixture(scope="session")
def plan(request: pytest.FixtureRequest) -> Plan:
    """The run that the flags and ``assay.toml`` describe, checked."""
    flags = {name: request.config.getoption(f"assay_{name}") for name in FLAGS}
    if flags["engine_arg"] is not None:
        flags["engine_arg"] = tuple(flags["engine_arg"])
    plan: Plan = _or_exit(lambda: prepare(make_spec(flags)))
    return plan


@pytest.fixture(scope="session")
def bench_plan(plan: Plan) -> BenchPlan | None:
    """The bench of a run that was asked for latency, checked."""
    planned: BenchPlan | None = _or_exit(partial(plan_latency, plan.spec))
    return planned


@pytest.fixture(scope="session")
def run_folder(plan: Plan, request: pytest.FixtureRequest) -> RunFolder:
    """The run's folder."""
    out = request.config.getoption("assay_out") or default_folder(plan.spec)
    folder: RunFolder = _or_exit(partial(open_folder, plan, out))
    return folder


@pytest.fixture(scope="session")
def servers(
    plan: Plan, bench_plan: BenchPlan | None, run_folder: RunFolder, request: pytest.FixtureRequest
) -> Iterator[dict[str, Engine]]:
    """Both servers by role, started side by side. If one does not start there is a report, and no test.

    Latency is timed first, on servers of its own: these here run until the last test, and would disturb it.
    """
    with ProgressDisplay(Console(stderr=True)) as display:
        time_servers(bench_plan, run_folder, display)
    engines = [make_run_engine(plan, run_folder, role) for role in asked_roles(plan, run_folder)]
    keep = ExitStack()
    if not run_folder.progress().failure:
        with recorded(run_folder), ExitStack() as started:
            started.enter_context(running(engines, plan.spec.device))
            keep = started.pop_all()
    if run_folder.progress().failure:
        failed = _write_report(run_folder, request.config)
        pytest.exit(f"assay: {failed.headline} {failed.reasons[0]}", returncode=failed.exit_code)
    with keep:
        yield {engine.role: engine for engine in engines}


@pytest.fixture(scope="session")
def reference_server(servers: dict[str, Engine]) -> Engine:
    """The running reference server."""
    return servers["reference"]


@pytest.fixture(scope="session")
def candidate_server(servers: dict[str, Engine]) -> Engine:
    """The running candidate server."""
    return servers["candidate"]


@pytest.fixture(scope="session")
def report(
    plan: Plan,
    run_folder: RunFolder,
    servers: dict[str, Engine],
    request: pytest.FixtureRequest,
) -> Report:
    """The report of a whole run; made once, written to the run's folder, and the session's exit code."""
    with ProgressDisplay(Console(stderr=True)) as display:
        collect(plan, run_folder, display, ready=list(servers.values()))
    return _write_report(run_folder, request.config)


def _write_report(folder: RunFolder, config: pytest.Config) -> Report:
    made = build(folder)
    write_all(made, folder.path)
    config.stash[_REPORT] = made
    return made


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Exit with the run's code: 1 is a regression, 3 no verdict, which pytest alone could not tell apart."""
    if made := session.config.stash.get(_REPORT, None):
        session.exitstatus = made.exit_code


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Say the verdict under the tests."""
    if made := config.stash.get(_REPORT, None):
        terminalreporter.section(f"assay: {made.verdict}")
        terminalreporter.write_line(made.headline)
        for reason in made.reasons:
            terminalreporter.write_line(f"- {reason}")
