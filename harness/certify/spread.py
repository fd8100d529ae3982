"""Certifying by several workers at once: each share of the catalogue is a command of its own, whose results are joined."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from assay.harness.certify.session import ATTEMPTS, CannotContinueError, Kept
from assay.harness.evidence.cell import OUT
from assay.harness.evidence.certificate import Certificate, CertifiedEnvelope
from assay.harness.progress import ProgressDisplay
from assay.harness.sweep.cell_process import CellWork
from assay.harness.sweep.executor import Ended, Executor, Needs, Task
from assay.harness.sweep.spec import Limits

SHARES = "shares"
_FILES_GB = 200.0
"""Most that a share may write: as the command itself, it has no limit to speak of."""
_MINUTES = 7 * 24 * 60.0
"""Time limit of a share: each of its examinations has one of its own."""


@dataclass(frozen=True)
class Spread:
    """The workers of a certificate.

    Attributes:
        executor: runs the shares.
        needs: what each of them needs.
        command: words of the command, without those that say what is examined and where it is kept.
        even: give each worker one share, since its servers take long to start; otherwise shares become smaller towards the end, so
            that no worker waits long for the last one.
    """

    executor: Executor
    needs: Needs
    command: Sequence[str]
    even: bool = False

    def certify(
        self,
        ids: Sequence[str],
        envelope: CertifiedEnvelope,
        folder: Path,
        display: ProgressDisplay,
        known: Sequence[str] = (),
    ) -> Certificate:
        """Examine everything that the folder has no result of, and write the certificate.

        Args:
            ids: of what to examine.
            envelope: where; a worker of another one has no results to give.
            folder: keeps the results; made if it does not exist.
            display: shows the progress.
            known: ids of everything that could be examined there; the certificate lists what was not asked for.

        Raises:
            EvidenceError: the folder cannot be written, or a result in it is damaged.
            CannotContinueError: a share ended several times without another result. A repeated command goes on.
        """
        kept = Kept.open(folder, envelope)
        for stopped in folder.glob(f"{SHARES}/*/{OUT}"):
            kept.take(stopped)
        with display, self.executor:
            left, asked, fruitless = (
                [id for id in ids if id not in kept.results],
                dict[str, list[str]](),
                dict[str, int](),
            )
            for share in _shares(left, self.executor.slots, self.even):
                task = self._task(share, envelope, folder)
                asked[task.key] = share
                self.executor.submit(task)
            for ended in self.executor.ended():
                key = ended.task.key
                more = kept.take(folder / SHARES / key / OUT)
                display.count("faults", sum(id in kept.results for id in ids), len(ids))
                missing = [id for id in asked[key] if id not in kept.results]
                fruitless[key] = 0 if more else fruitless.get(key, 0) + 1
                if missing and fruitless[key] > ATTEMPTS:  # what ends its process so often has a result: it crashes
                    raise _failed(ended, missing, folder)
                if missing:
                    self.executor.submit(ended.task)
        return kept.certificate(ids, known)

    def _task(self, share: Sequence[str], envelope: CertifiedEnvelope, folder: Path) -> Task[object]:
        command = ("certify", *self.command, *(f"--fault={id}" for id in share))
        key = sha256("\n".join([envelope.model_dump_json(), *command]).encode()).hexdigest()[:12]
        limits = Limits(minutes=_MINUTES, disk_gb=_FILES_GB)
        return Task(key, CellWork(key, command, {}, limits), folder / SHARES / key, self.needs)


def _shares(ids: Sequence[str], workers: int, even: bool) -> list[list[str]]:
    """Divide ids among workers: into one share each, or each time into half of what is left, so that the last shares are small."""
    if even:
        return [[*ids[number::workers]] for number in range(min(workers, len(ids)))]
    divided, place = list[list[str]](), 0
    while place < len(ids):
        size = math.ceil((len(ids) - place) / (2 * workers))
        divided.append([*ids[place : place + size]])
        place += size
    return divided


def _failed(ended: Ended[object], missing: Sequence[str], folder: Path) -> CannotContinueError:
    why = (
        getattr(ended.value, "problem", "") or str(ended.error or "") or "it has results of another machine or version"
    )
    return CannotContinueError(
        f"A share of the catalogue ended without a result of {missing[0]}: {why}",
        "workers with the same versions and devices as here",
        f"see {folder / SHARES / ended.task.key}; a repeated command goes on",
    )
