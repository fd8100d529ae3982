"""Certifying: everything of a catalogue is examined once, each result is kept, and a repeated command goes on from there."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from types import FrameType

from assay.harness.bugs.seeded import SeededFault
from assay.harness.errors import AssayError, EvidenceError, UsageError
from assay.harness.evidence import jsonl
from assay.harness.evidence.certificate import (
    FILE,
    Certificate,
    CertifiedEnvelope,
    Examined,
    Kind,
    Outcome,
    verdict_on,
)
from assay.harness.files import timestamp, write_whole
from assay.harness.localize.bounds import noise_kept
from assay.harness.progress import ProgressDisplay
from assay.harness.text import did_you_mean

ATTEMPTS = 2
"""Times that an examination may end the whole process before it counts as a crash: the first may have been stopped by hand."""


class CannotContinueError(AssayError):
    """Nothing can be examined any more, through no fault that was seeded. Exit code 3; a repeated command goes on."""


@dataclass(frozen=True)
class Trial:
    """One examination.

    Attributes:
        id: of what is examined.
        kind: "fault", "equivalent" or "honest".
        title: name in prose.
        links: public reports of such a bug.
        restricted: where it is seeded, in words.
        examine: examines it.
    """

    id: str
    kind: Kind
    title: str
    links: tuple[str, ...]
    restricted: str
    examine: Callable[[], Examined]

    @classmethod
    def of(cls, fault: SeededFault, examine: Callable[[SeededFault], Examined]) -> Trial:
        """Make the examination of a fault."""
        kind: Kind = "equivalent" if fault.equivalent else "fault"
        return cls(fault.id, kind, fault.title, fault.links, fault.where.words, lambda: examine(fault))


def chosen(tasks: Sequence[Trial], only: Collection[str]) -> list[Trial]:
    """List the tasks with these ids; all of them if none is given.

    Raises:
        UsageError: there is nothing with one of these ids.
    """
    known = [task.id for task in tasks]
    if unknown := sorted(set(only) - set(known)):
        near = did_you_mean(unknown[0], known)
        raise UsageError(
            f"There is no fault {', '.join(unknown)}.", f"one of {', '.join(known)}", near or "correct the id"
        )
    return [task for task in tasks if not only or task.id in only]


def certify(
    tasks: Sequence[Trial],
    envelope: CertifiedEnvelope,
    folder: Path,
    display: ProgressDisplay,
    time_limit: float,
    known: Sequence[str] = (),
) -> Certificate:
    """Examine everything that the folder has no result of, and write the certificate after each.

    Results are bound to the envelope, which holds the hash of assay's source code: those of another are left alone.

    Args:
        tasks: what to examine.
        envelope: where.
        folder: keeps the results; made if it does not exist.
        display: shows the progress.
        time_limit: longest examination, in seconds.
        known: ids of everything that could be examined there; the certificate lists what was not asked for.

    Raises:
        EvidenceError: the folder cannot be written, or a result in it is damaged.
        CannotContinueError: an examination reports that no other can be made either.
    """
    kept = Kept.open(folder, envelope)
    with display, noise_kept():
        for number, task in enumerate(tasks):
            if task.id not in kept.results:
                kept.add(_ended(task, kept) or _examined(task, kept, time_limit))
            display.count("faults", number + 1, len(tasks))
    return kept.certificate([task.id for task in tasks], known)


def _examined(task: Trial, kept: Kept, time_limit: float) -> Examined:
    begun = time.monotonic()
    kept.begin(task.id)
    try:
        with _limited(time_limit):
            return task.examine()
    except TimeoutError as error:
        return _unfinished(task, "time-out", str(error), time.monotonic() - begun)
    except (EvidenceError, CannotContinueError):
        raise  # the disk is full, or no server starts: not the fault's doing
    except Exception as error:  # whatever a fault makes of the harness is a result
        return _unfinished(task, "crash", f"{type(error).__name__}: {error}", time.monotonic() - begun)
    finally:
        kept.end()


def _ended(task: Trial, kept: Kept) -> Examined | None:
    """Record an examination that ended the whole process, each time that it was tried."""
    if kept.attempts(task.id) < ATTEMPTS:
        return None
    return _unfinished(task, "crash", f"the process ended {ATTEMPTS} times while this was examined", 0.0)


def _unfinished(task: Trial, outcome: Outcome, why: str, seconds: float) -> Examined:
    return Examined(
        id=task.id, kind=task.kind, title=task.title, links=task.links, restricted=task.restricted,
        outcome=outcome, why=why, seconds=seconds,
    )  # fmt: skip


@contextmanager
def _limited(seconds: float) -> Iterator[None]:
    """Raise a TimeoutError in this thread after so many seconds. Without an effect outside the main thread."""

    def expired(number: int, frame: FrameType | None) -> None:
        raise TimeoutError(f"not done after {seconds:g} s")

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGALRM, expired)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


class Kept:
    """The results in a folder that belong to one envelope."""

    def __init__(self, folder: Path, envelope: CertifiedEnvelope, results: Mapping[str, Examined]) -> None:
        self.results = dict(results)
        self._folder, self._envelope = folder, envelope
        self._running, self._results = folder / f"running-{_key(envelope)}", _results(folder, envelope)

    @classmethod
    def open(cls, folder: Path, envelope: CertifiedEnvelope) -> Kept:
        """Open a folder, which is made if it does not exist.

        Raises:
            EvidenceError: it cannot be made, or a result in it is damaged.
        """
        path = _results(folder, envelope)
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise EvidenceError(
                f"{folder} cannot be created: {error.strerror}.", "a writable folder", "name another --out"
            ) from error
        jsonl.drop_cut_line(path)
        return cls(folder, envelope, {examined.id: examined for examined in jsonl.read(path, Examined)})

    def add(self, examined: Examined) -> None:
        """Keep a result."""
        self.results[examined.id] = examined
        jsonl.append(self._results, [examined])

    def take(self, folder: Path) -> int:
        """Keep what another folder has of this envelope; return how many of its results are new.

        Raises:
            EvidenceError: a result in it is damaged.
        """
        path = _results(folder, self._envelope)
        jsonl.drop_cut_line(path)
        new = [examined for examined in jsonl.read(path, Examined) if examined.id not in self.results]
        for examined in new:
            self.add(examined)
        return len(new)

    def attempts(self, id: str) -> int:
        """Count how often an examination ended the whole process."""
        return _lines(self._running).count(id)

    def begin(self, id: str) -> None:
        """Note that an examination has begun."""
        write_whole(self._running, "\n".join([*_lines(self._running), id]), durable=False)

    def end(self) -> None:
        """Note that the process outlived the examination."""
        self._running.unlink(missing_ok=True)

    def certificate(self, ids: Sequence[str], known: Sequence[str] = ()) -> Certificate:
        """Write and return the certificate on what was asked for."""
        examined = tuple(self.results[id] for id in ids if id in self.results)
        left = tuple(id for id in ids if id not in self.results)
        made = Certificate(
            verdict=verdict_on(examined, left), made=timestamp(), envelope=self._envelope,
            examined=examined, left=left, not_asked=tuple(id for id in known if id not in ids),
        )  # fmt: skip
        write_whole(self._folder / FILE, made.model_dump_json(indent=2) + "\n")
        return made


def _results(folder: Path, envelope: CertifiedEnvelope) -> Path:
    return folder / f"results-{_key(envelope)}.jsonl"


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


def _key(envelope: CertifiedEnvelope) -> str:
    return sha256(envelope.model_dump_json().encode()).hexdigest()[:12]
