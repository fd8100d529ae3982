"""Certifying by several workers: shares of the catalogue, whose results are joined."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from assay.harness.certify import spread
from assay.harness.certify.session import CannotContinueError, Kept, certify
from assay.harness.certify.spread import Spread, _shares
from assay.harness.evidence.certificate import CertifiedEnvelope, Examined
from assay.harness.progress import ProgressDisplay
from assay.harness.sweep.executor import Needs, Workplace
from assay.harness.sweep.this_machine import ThisMachine

QUIET = ProgressDisplay(Console(quiet=True))
IDS = [f"fault-{number}" for number in range(20)]


def envelope(**over: Any) -> CertifiedEnvelope:
    given: dict[str, Any] = {
        "level": "op", "device": "cpu", "dtypes": ("float32",), "torch": "2.9", "layers": 4, "heads": 8, "most_new": 9,
        "longest": 9, "largest_batch": 2, "suites": ("op-level",), "source": "s",
    }  # fmt: skip
    return CertifiedEnvelope.model_validate(given | over)


def result(id: str) -> Examined:
    return Examined(id=id, kind="fault", title=id, outcome="caught", seconds=0.1)


@dataclass(frozen=True)
class Share:
    """In place of a command: keeps results of its envelope, and stops where it is told to."""

    key: str
    command: tuple[str, ...]
    axes: dict[str, str]
    limits: object

    def __call__(self, place: Workplace) -> None:
        out = place.folder / spread.OUT
        kept = Kept.open(out, SERVED[0])
        for id in (word.removeprefix("--fault=") for word in self.command if word.startswith("--fault=")):
            RAN.append(id)
            if id not in kept.results:
                if DEADLY.get(id, 0):
                    DEADLY[id] -= 1
                    raise RuntimeError("killed")
                kept.add(result(id))


SERVED: list[CertifiedEnvelope] = []
RAN: list[str] = []
DEADLY: dict[str, int] = {}
"""How often the share of a fault dies there."""


@pytest.fixture(autouse=True)
def _in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spread, "CellWork", Share)
    SERVED[:], RAN[:] = [envelope()], []
    DEADLY.clear()


def spreading(jobs: int = 4, even: bool = False) -> Spread:
    return Spread(ThisMachine(Needs(), jobs), Needs(), ["--level=op"], even)


def test_shares_cover_everything_once_and_become_smaller() -> None:
    for workers in (1, 2, 7, 30):
        for even in (False, True):
            divided = _shares(IDS, workers, even)
            assert sorted(id for share in divided for id in share) == sorted(IDS)
            sizes = [len(share) for share in divided]
            if even:
                assert len(divided) == min(workers, len(IDS))
                assert max(sizes) - min(sizes) <= 1
            else:
                assert sizes == sorted(sizes, reverse=True)
                assert sizes[-1] == 1, "no worker waits for more than the last one"
    assert _shares([], 3, even=True) == _shares([], 3, even=False) == []


def test_joined_results_are_those_of_one_process(tmp_path: Path) -> None:
    made = spreading().certify(IDS, envelope(), tmp_path / "out", QUIET, [*IDS, "not-asked"])
    assert [examined.id for examined in made.examined] == IDS
    assert (made.verdict, made.left, made.not_asked) == ("pass", (), ("not-asked",))
    alone = certify([], envelope(), tmp_path / "out", QUIET, 1, IDS)
    assert alone.examined == (), "the folder is that of a command without workers"
    assert sorted(Kept.open(tmp_path / "out", envelope()).results) == sorted(IDS)
    RAN.clear()
    assert spreading().certify(IDS, envelope(), tmp_path / "out", QUIET).examined == made.examined
    assert RAN == [], "nothing is examined again"


def test_a_share_that_dies_goes_on(tmp_path: Path) -> None:
    DEADLY["fault-7"] = 1
    made = spreading(2).certify(IDS, envelope(), tmp_path / "out", QUIET)
    assert [examined.id for examined in made.examined] == IDS


def test_what_stopped_shares_have_found_is_kept(tmp_path: Path) -> None:
    DEADLY["fault-19"] = 100
    with pytest.raises(CannotContinueError, match=r"without a result of fault-19: killed"):
        spreading(1).certify(IDS, envelope(), tmp_path / "out", QUIET)
    assert set(IDS) - set(Kept.open(tmp_path / "out", envelope()).results) == {"fault-19"}
    DEADLY.clear()
    RAN.clear()
    # One share more, whose command was killed beside this one.
    Kept.open(tmp_path / "out" / spread.SHARES / "other" / spread.OUT, envelope()).add(result("fault-20"))
    left = spreading(3).certify(["fault-20"], envelope(), tmp_path / "out", QUIET)
    assert ([one.id for one in left.examined], RAN) == (["fault-20"], [])
    made = spreading(3).certify(IDS, envelope(), tmp_path / "out", QUIET)
    assert [examined.id for examined in made.examined] == IDS
    assert RAN == ["fault-19"]


def test_results_of_another_envelope_are_no_results(tmp_path: Path) -> None:
    SERVED[0] = envelope(torch="2.0")
    with pytest.raises(CannotContinueError, match="another machine or version"):
        spreading().certify(IDS[:2], envelope(), tmp_path / "out", QUIET)


@pytest.mark.slow
def test_the_command_gives_the_same_certificate_with_workers(
    call: Callable[..., int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    ids = ("last-block-lost-16", "mask-top-left", "honest-exact")
    # On a busy machine, an examination takes longer than the 120 seconds that it has by default.
    chosen = [*(word for id in ids for word in ("--fault", id)), "--time-limit", "1200"]
    assert call("certify", "--device", "cpu", *chosen, "--jobs", "2", "--out", "out") == 0
    again = call("certify", "--device", "cpu", *chosen, "--out", "out")
    assert again == 0, "one process finds nothing left to do"
    assert len(list((tmp_path / "out").glob("results-*.jsonl"))) == 1
