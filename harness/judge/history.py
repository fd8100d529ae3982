"""A folder of runs -> the result of each of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal

from pydantic import Field

from assay.harness.errors import EvidenceError, UsageError
from assay.harness.judge.report import NOT_FINITE, OwnError, Report, excess, read_report
from assay.harness.reading import whole_file
from assay.harness.schema import RULE, Part
from assay.harness.text import listed
from assay.harness.verdict import Verdict, serious

SCHEMA: Literal["assay.runs/1"] = "assay.runs/1"
REPORT, PAGE, MANIFEST = "report.json", "report.html", "manifest.json"


class RunLine(Part):
    """One run, summarised from its ``report.json``."""

    folder: str
    run_id: str = ""
    created: str = Field("", description="ISO 8601, UTC, or empty without a report")
    verdict: Verdict | None = Field(None, description="null if the run has no readable report")
    cause: str = Field("", description="title of the first serious finding, if any")
    reference: str = ""
    candidate: str = ""
    model: str = ""
    device: str = ""
    suites: dict[str, Verdict] = Field({}, description="verdict by id of the suite")
    worst: OwnError = Field(
        None,
        description="error nearest to its bound or farthest beyond it, as a multiple of the bound; null: not observed",
    )
    seconds: float = 0.0
    problem: str = Field("", description="why the verdict is missing, or empty")

    treatment: dict[str, tuple[str, str]] = Field({}, description="as in the run's report")


class RunList(Part):
    __doc__ = f"A folder of runs, newest first. {RULE}"

    schema_id: Literal["assay.runs/1"] = Field(SCHEMA, alias="schema")

    folder: str
    runs: tuple[RunLine, ...]


def list_runs(folder: Path) -> RunList:
    """List the folders in a folder that hold a report or a manifest of a run. Reports are read, not made again."""
    if not folder.is_dir():
        raise UsageError(
            f"{folder} is a file." if folder.exists() else f"The folder {folder} does not exist.",
            "a folder that holds the folders of runs",
            "make a run first (assay run), or name the folder",
        )
    lines = [_line(path) for path in sorted(folder.iterdir()) if _is_run(path)]
    return RunList(
        folder=str(folder), runs=tuple(sorted(lines, key=lambda line: (line.created, line.folder), reverse=True))
    )


def find_run(named: Path | None, folder: Path) -> Path:
    """Find the run that a user means.

    Args:
        named: path of a run's folder or of its report; the unique beginning of such a folder's name, by itself for one in `folder`;
            None for the newest run of `folder` that has a report.

    Raises:
        UsageError: several runs begin like this, or none of the runs has a report.
    """
    if named is None:
        newest = next((run for run in list_runs(folder).runs if run.verdict is not None), None)
        if newest is None:
            raise UsageError(
                f"No run in {folder} has a report.", "a run that has ended", "name one, or make one: assay run"
            )
        return Path(newest.folder)
    if named.exists() or not named.name:
        return named
    above = folder if named.parent == Path() else named.parent
    matching = sorted(path for path in above.glob("*") if path.name.startswith(named.name) and _is_run(path))
    if len(matching) > 1:
        raise UsageError(
            f"{len(matching)} runs in {above} begin with {named.name}: {listed([path.name for path in matching[:8]])}.",
            "the beginning of one run's name",
            "add to it until only one run matches",
        )
    return matching[0] if matching else named


def report_of(run: Path) -> Report:
    """Read the report that a run has already, from its folder or its ``report.json``. Nothing is judged again.

    Raises:
        UsageError: the folder does not exist, or is not a run.
        EvidenceError: the run has no report, or one that cannot be read.
    """
    path = run / REPORT if run.is_dir() else run
    if path.is_file():
        return read_report(path)
    check_run(run)
    raise EvidenceError(
        f"{run} has no {REPORT}.", "a run that has ended", f"once the run has ended, make it: assay report {run}"
    )


def check_run(run: Path) -> None:
    """Make sure that a path is the folder of a run, ended or not."""
    if not run.exists():
        raise UsageError(f"{run} does not exist.", "the folder of a run", "assay runs lists them")
    if not (run / MANIFEST).is_file():
        why = f"it has no {MANIFEST}" if run.is_dir() else "it is a file"
        raise UsageError(f"{run} is not a run: {why}.", "the folder of a run", "assay runs lists them")


def worst_own(report: Report) -> OwnError:
    """Return the error against the truth that is nearest to its bound, or farthest beyond it, as a multiple of the bound."""
    rows = report.layers.against_truth if report.layers else ()
    seen = [(row.own, row.bound) for row in rows if row.own is not None]
    error, bound = max(seen, key=lambda pair: excess(*pair), default=(None, None))
    return error / bound if isinstance(error, float) and bound else NOT_FINITE if error == NOT_FINITE else None


def _line_of(report: Report, folder: str) -> RunLine:
    """Summarise a report in one line."""
    wrong = serious(report.findings)
    return RunLine(
        folder=folder,
        run_id=report.run_id,
        created=report.created,
        verdict=report.verdict,
        cause=wrong[0].title if wrong else "",
        reference=report.reference.backend,
        candidate=report.candidate.backend,
        model=report.environment.model,
        device=report.environment.device,
        treatment=report.treatment,
        suites={suite.id: suite.verdict for suite in report.suites},
        worst=worst_own(report),
        seconds=report.seconds,
    )


def _is_run(path: Path) -> bool:
    """Return True if a folder is a run's: with a run's manifest, or a report of a run, not of a bisection."""
    try:
        if not path.is_dir():
            return False
        if (path / MANIFEST).is_file() and (path / "items.jsonl").is_file():
            return True
        document = json.loads(whole_file(path / REPORT))
    except FileNotFoundError:
        return False
    except (OSError, ValueError, RecursionError, EvidenceError):  # a damaged report is listed as such
        return True
    return isinstance(document, dict) and str(document.get("schema", "")).startswith("assay.report/")


def _line(path: Path) -> RunLine:
    try:
        return _line_of(report_of(path), str(path))
    except OSError as error:
        return RunLine(folder=str(path), run_id=path.name, problem=f"it cannot be read: {error.strerror or error}")
    except (EvidenceError, UsageError) as error:
        do = f"; {error.do}" if error.do else ""
        problem = f"it {rest}" if (rest := error.found.removeprefix(f"{path} ")) != error.found else rest
        return RunLine(folder=str(path), run_id=path.name, problem=f"{problem.rstrip('.')}{do}")
