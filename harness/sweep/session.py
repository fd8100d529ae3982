"""A sweep from its plan to its result: cells that have ended are kept, the others run, and what is on disk is always whole.

``<sweep>/sweep.json`` holds the sweep itself, ``<sweep>/cells/<key>/`` a cell each. There is no other state: whatever ends this
process, the same command goes on from there.
"""

from __future__ import annotations

import hashlib
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from pydantic import ConfigDict, Field

from assay.harness.collect.machine import git_state
from assay.harness.config import RUNS
from assay.harness.errors import AssayError, UsageError
from assay.harness.evidence.cell import CELLS, CellRecord, read_cell, write_cell
from assay.harness.files import FolderLock, is_unused, timestamp, write_whole
from assay.harness.progress import ProgressDisplay
from assay.harness.schema import Record, read_json
from assay.harness.sweep.cell_process import PACK, CellWork, environment, finished, hashes
from assay.harness.sweep.cells import Combination, SweepCell, SweepPlan
from assay.harness.sweep.executor import Ended, Executor, Needs, Task
from assay.harness.sweep.result import STOPS, SweepResult, SweptCell, SweptCombination
from assay.harness.sweep.spec import Limits, SweepSpec
from assay.harness.text import counted
from assay.harness.verdict import WORST_FIRST, Verdict

_STATE = "sweep.json"
_NOT_SURVIVED, _STOPPED, _NO_PACK = (
    "it did not survive an earlier stage",
    "the sweep was stopped",
    "its pack was not recorded",
)


class SweepState(Record):
    """``sweep.json``: the sweep of a folder, which ``--resume`` repeats."""

    model_config = ConfigDict(serialize_by_alias=True, populate_by_name=True)

    schema_id: Literal["assay.sweep-state/1"] = Field("assay.sweep-state/1", alias="schema")
    spec: SweepSpec
    command: str


def default_folder(spec: SweepSpec) -> Path:
    """Return the folder of a sweep without ``--out``, named after what it does: the same sweep goes on there."""
    return RUNS / f"sweep-{hashlib.sha256(spec.model_dump_json().encode()).hexdigest()[:10]}"


def latest_folder() -> Path:
    """Return the folder in ``runs/`` whose sweep was started last.

    Raises:
        UsageError: there is none.
    """
    states = sorted(RUNS.glob(f"sweep-*/{_STATE}"), key=lambda path: path.stat().st_mtime)
    if not states:
        raise UsageError(f"There is no sweep in {RUNS}/.", "at least one", "name its folder with --out")
    return states[-1].parent


def read_state(folder: Path) -> SweepState:
    """Read the sweep of a folder.

    Raises:
        UsageError: there is none.
        EvidenceError: it is damaged.
    """
    if not (folder / _STATE).is_file():
        raise UsageError(f"{folder} holds no sweep.", f"a folder with a {_STATE}", "check the path given with --out")
    return read_json(folder / _STATE, SweepState, "start the sweep again with another --out")


def needs_of(limits: Limits, accelerator: str = "") -> Needs:
    """Return what a cell needs of a worker."""
    return Needs(limits.cpus, limits.gpus, limits.memory_gb, accelerator or limits.accelerator)


def _cell_folder(sweep: Path, key: str) -> Path:
    """Return the folder of a cell."""
    return sweep / CELLS / key


@dataclass
class Sweep:
    """A sweep that runs.

    Args:
        state: the sweep.
        plan: its cells.
        folder: where it is kept.
        stop_after: regressions after which no further cell is run; 0 for never.
    """

    state: SweepState
    plan: SweepPlan
    folder: Path
    stop_after: int = 0
    _commit: str = ""
    _records: dict[str, CellRecord] = field(default_factory=dict)
    _earlier: set[str] = field(default_factory=set)
    _skipped: dict[str, str] = field(default_factory=dict)
    _before: dict[str, list[Sequence[SweepCell]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for combination in self.plan.combinations:
            for place, cell in enumerate(combination.cells):
                self._before.setdefault(cell.key, []).append(combination.cells[:place])

    def run(self, executor: Executor, display: ProgressDisplay) -> SweepResult:
        """Run what has not ended, and return the result. An interruption is part of it.

        Raises:
            UsageError: the folder holds something else, or another process sweeps there.
            EvidenceError: the folder cannot be written.
        """
        begun, ended_early = time.monotonic(), ""
        lock = self._open()
        try:
            with executor:
                for stage in self._stages():
                    if ended_early := self._run(stage, executor, display):
                        break
        except KeyboardInterrupt:
            ended_early = "it was interrupted"
        result = self.result(time.monotonic() - begun, ended_early)
        del lock
        return result

    def result(self, seconds: float = 0.0, ended_early: str = "") -> SweepResult:
        """Make the result of what has ended so far."""
        cells = [
            _swept(cell, self._records.get(key), self._skipped.get(key, _STOPPED), key in self._earlier)
            for key, cell in self.plan.cells.items()
        ]
        verdicts = {cell.key: cell.verdict for cell in cells}
        combinations = tuple(_traced(combination, verdicts) for combination in self.plan.combinations)
        # A cell that was left out because an earlier stage decided is no gap.
        shown = [cell for cell in cells if cell.verdict or self._skipped.get(cell.key) != _NOT_SURVIVED]
        axes = {name: tuple(dict.fromkeys(c.axes[name] for c in combinations)) for name in self.state.spec.axes}
        return SweepResult(
            verdict=_worst(shown), command=self.state.command, folder=str(self.folder), created=timestamp(), seconds=seconds,
            stages=self.state.spec.stages, axes=axes, headline=_headline_of(shown), cells=tuple(shown),
            combinations=combinations, ended_early=ended_early,
        )  # fmt: skip

    def load(self) -> list[SweepCell]:
        """Take the cells that have ended, and return those that are left."""
        for key in self.plan.cells:
            if (record := finished(_cell_folder(self.folder, key), key)) is not None:
                self._records[key] = record
                self._earlier.add(key)
        return [cell for key, cell in self.plan.cells.items() if key not in self._records]

    def _open(self) -> FolderLock:
        """Lock the folder, write the sweep there, and take what has ended.

        Raises:
            UsageError: the folder holds something else, or another process sweeps there.
        """
        if not (self.folder / _STATE).exists() and not is_unused(self.folder):
            raise UsageError(
                f"{self.folder} exists and is not the folder of a sweep.", "a new folder, or that of a sweep",
                "name another one with --out",
            )  # fmt: skip
        lock = FolderLock(self.folder)
        write_whole(self.folder / _STATE, self.state.model_dump_json(indent=1))
        self._commit = git_state(Path.cwd()).partition(" ")[0]
        self.load()
        return lock

    def _stages(self) -> Iterator[list[SweepCell]]:
        """Yield the cells of each stage that are to be run; what a stage finds decides which cells the next one has."""
        for stage in dict.fromkeys(cell.command[0] for cell in self.plan.cells.values()):
            yield [cell for cell in self.plan.cells.values() if cell.command[0] == stage and self._is_due(cell)]

    def _is_due(self, cell: SweepCell) -> bool:
        """Return True if a cell has to run; note why not, if it does not although it has no verdict."""
        if cell.key in self._records:
            return False
        if cell.pack and (cell.pack not in self._records or self._records[cell.pack].verdict != "pass"):
            self._skipped[cell.key] = _NO_PACK
            return False
        before = self._before.get(cell.key)
        if before is None or any(map(self._survived, before)):
            return True
        self._skipped[cell.key] = _NOT_SURVIVED
        return False

    def _survived(self, cells: Sequence[SweepCell]) -> bool:
        """Return True if all cells have a verdict that lets a combination go on."""
        return all(cell.key in self._records and self._records[cell.key].verdict not in STOPS for cell in cells)

    def _run(self, cells: Sequence[SweepCell], executor: Executor, display: ProgressDisplay) -> str:
        """Run the cells of a stage; return why it ended early, if it did."""
        if not cells:
            return ""
        if self._enough():
            return f"{self.stop_after} regressions were found"
        for cell in cells:
            executor.submit(self._task(cell))
        for done, ended in enumerate(executor.ended(), 1):
            record = self._ended(ended)
            self._records[record.key] = record
            display.say(f"{record.verdict}: {' '.join(record.command)}{record.problem and ': ' + record.problem}")
            display.count(f"{cells[0].command[0]}: cells", done, len(cells))
            if self._enough():
                return f"{self.stop_after} regressions were found"
        return ""

    def _enough(self) -> bool:
        if not self.stop_after:
            return False
        return sum(record.verdict == "regression" for record in self._records.values()) >= self.stop_after

    def _task(self, cell: SweepCell) -> Task[CellRecord]:
        """Make the task of a cell."""
        limits = self.state.spec.limits
        inputs = {PACK: _cell_folder(self.folder, cell.pack) / PACK} if cell.pack else {}
        work = CellWork(cell.key, cell.command, cell.axes, limits, self._commit)
        return Task(cell.key, work, _cell_folder(self.folder, cell.key), needs_of(limits, cell.accelerator), inputs)

    def _ended(self, ended: Ended[CellRecord]) -> CellRecord:
        """Return the record of a cell that has ended: the one on disk, with its evidence, or that of an error."""
        cell, folder = self.plan.cells[ended.task.key], _cell_folder(self.folder, ended.task.key)
        record = read_cell(folder)
        if ended.value is not None and record == ended.value:
            if record.verdict == "error" or finished(folder, cell.key) is not None:
                return record
            there = hashes(folder)
            differing = sorted(name for name, _ in there.items() ^ record.evidence.items())
            problem = f"Its evidence is not that of which its record was made: {', '.join(dict.fromkeys(differing))}."
        elif isinstance(ended.error, AssayError):
            problem = ended.error.found
        else:
            problem = f"{type(ended.error).__name__}: {ended.error}" if ended.error else "Its record did not arrive."
        failed = CellRecord(
            key=cell.key, command=cell.command, axes=dict(cell.axes), verdict="error", problem=problem, attempts=ended.attempts,
            worker=ended.worker, environment=environment(), created=timestamp(),
        )  # fmt: skip
        write_cell(folder, failed)
        return failed


def estimate(sweep: Sweep, slots: int) -> tuple[float, int]:
    """Estimate how long the cells take that have not ended: seconds, and for how many of them an earlier duration is known.

    A cell takes what one with the same command took in the folder, or else the mean of those of the same stage. Those that later
    stages may leave out are counted.
    """
    left = sweep.load()
    known: dict[tuple[str, ...], float] = {}
    stages: dict[str, list[float]] = {}
    for path in sorted((sweep.folder / CELLS).glob("*")):
        record = read_cell(path)
        if record is not None and record.seconds:
            known[record.command] = record.seconds
            stages.setdefault(record.stage, []).append(record.seconds)
    seconds, counted = 0.0, 0
    for cell in left:
        of_stage = stages.get(cell.command[0], [])
        if (took := known.get(cell.command, sum(of_stage) / len(of_stage) if of_stage else None)) is not None:
            seconds, counted = seconds + took, counted + 1
    return seconds / max(1, slots), counted


def _swept(cell: SweepCell, record: CellRecord | None, problem: str = "", earlier: bool = False) -> SweptCell:
    """Describe what became of a cell; without a record it did not run, or failed before it could leave one."""
    if record is None:
        return SweptCell(key=cell.key, command=cell.command, axes=dict(cell.axes), verdict=None, problem=problem)
    return SweptCell(
        key=cell.key, command=cell.command, axes=dict(cell.axes), verdict=record.verdict, headline=record.headline,
        problem=record.problem, seconds=record.seconds, attempts=record.attempts, worker=record.worker,
        environment=record.environment, earlier=earlier,
    )  # fmt: skip


def _traced(combination: Combination, verdicts: Mapping[str, Verdict | None]) -> SweptCombination:
    """Describe how far a combination came.

    Args:
        combination: the combination.
        verdicts: by key of a cell; a cell that did not run has none.
    """
    reached, stopped = {}, ""
    for cell in combination.cells:
        if verdicts.get(cell.key) is None:
            break
        reached[cell.command[0]] = cell.key
        if verdicts[cell.key] in STOPS:
            stopped = cell.command[0]
            break
    return SweptCombination(axes=dict(combination.axes), cells=reached, stopped=stopped)


def _worst(cells: Sequence[SweptCell]) -> Verdict:
    """Return the verdict of a sweep: the worst of its cells'. One that did not run is undecided."""
    verdicts = {cell.verdict or "inconclusive" for cell in cells}
    return next((verdict for verdict in WORST_FIRST if verdict in verdicts), "inconclusive")


def _headline_of(cells: Sequence[SweptCell]) -> str:
    """Summarise a sweep in a sentence: "12 cells: 1 regression, 11 pass"."""
    counts = Counter(cell.verdict for cell in cells)
    parts = [f"{counts[verdict]} {verdict}" for verdict in WORST_FIRST if counts[verdict]]
    parts += [f"{counts[None]} not run"] if counts[None] else []
    return f"{counted(len(cells), 'cell')}: {', '.join(parts)}."
