"""A number over commits and dates, and after which of them it moved."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from assay.harness.errors import UsageError
from assay.harness.evidence.cell import CellRecord, write_cell
from assay.harness.history.table import RunTable
from assay.harness.history.trend import ALPHA, Trend, trend_of, usual_trends

pytest.importorskip("duckdb")


def nights(root: Path, errors: dict[str, list[float]], commits: list[str] | None = None) -> RunTable:
    """A cell of each candidate on each night, with this own error."""
    for candidate, values in errors.items():
        for night, own in enumerate(values):
            folder = root / f"n{night:03}" / "cells" / candidate
            folder.mkdir(parents=True)
            (folder / "result.json").write_text(f'{{"worst_own": {own!r}, "worst_bound": 0.01}}')
            commit = commits[night] if commits else f"{night:040x}"
            record = CellRecord(
                verdict="pass", key=candidate, command=("check",), axes={"candidate": candidate, "model": "tiny"},
                created=f"2026-{1 + night // 28:02}-{1 + night % 28:02}T10:00:00Z", environment={"commit": commit},
            )  # fmt: skip
            write_cell(folder, record)
    return RunTable(str(root))


class Rows(RunTable):
    """The rows of `nights`, without its files: they take most of the time where there are many."""

    def __init__(self, errors: dict[str, list[float]]) -> None:
        self.place = "memory"
        self._before = ""
        self._rows = [
            {
                "run": f"n{night:03}/cells/{candidate}", "created": f"2026-{1 + night // 28:02}-{1 + night % 28:02}T10:00:00Z",
                "commit": f"{night:040x}", "model": "tiny", "candidate": candidate, "reference": "", "device": "",
                "treatment": "{}", "metric": "own-error", "value": own, "low": None, "high": None, "bound": 0.01,
            }
            for candidate, values in errors.items()
            for night, own in enumerate(values)
        ]  # fmt: skip

    def rows(self, where: str = "", columns: Sequence[str] = ()) -> list[tuple[Any, ...]]:
        return [tuple(row[name] for name in columns) for row in self._rows]


def steady(random: np.random.Generator, n: int, mean: float = 2e-3) -> list[float]:
    return [float(mean * np.exp(0.1 * random.normal())) for _ in range(n)]


def test_the_first_date_after_a_move_is_named(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    errors = {"moves": steady(random, 14) + steady(random, 6, 6e-3), "stays": steady(random, 20), "new": [2e-3]}
    trend = trend_of(nights(tmp_path, errors), "own-error")
    assert [series.candidate for series in trend.series] == ["moves", "stays", "new"], "what moved comes first"
    (move,) = trend.series[0].moves
    assert (move.after, move.first, move.index) == ("2026-01-14 10:00", "2026-01-15 10:00", 14)
    assert move.before_mean == pytest.approx(2e-3, rel=0.1)
    assert move.after_mean == pytest.approx(6e-3, rel=0.1)
    assert move.p <= ALPHA
    assert not trend.series[1].moves
    assert [point.bound for point in trend.series[2].points] == [0.01]
    assert trend.series[2].title == "own-error: new (check), tiny"
    assert trend.series[2].model_copy(update={"model": ""}).title == "own-error: new (check)"
    assert Trend.model_validate_json(trend.model_dump_json(by_alias=True)) == trend


def test_by_commit_a_move_is_between_two_commits(tmp_path: Path) -> None:
    random = np.random.default_rng(1)
    commits = [str(number // 5) * 40 for number in range(20)]
    history = nights(tmp_path, {"moves": steady(random, 11) + steady(random, 9, 9e-3)}, commits)
    (move,) = trend_of(history, "own-error", by="commit").series[0].moves
    # It moved at the second run of commit 2, so the commit as a whole is on either side; within it is no move.
    assert (move.after, move.first) == ("1" * 12, "2" * 12)


def test_among_many_series_few_false_moves() -> None:
    random = np.random.default_rng(2)
    errors = {f"k{number:03}": steady(random, 12) for number in range(150)}
    trend = trend_of(Rows(errors), "own-error")
    assert sum(bool(series.moves) for series in trend.series) == 0
    assert len(trend.series) == 150


def test_one_that_moved_is_found_among_many() -> None:
    random = np.random.default_rng(3)
    errors = {f"k{number:03}": steady(random, 20) for number in range(60)}
    errors["k030"][10:] = steady(random, 10, 9e-3)
    trend = trend_of(Rows(errors), "own-error")
    assert [series.candidate for series in trend.series if series.moves] == ["k030"]


def test_a_condition_limits_a_trend_and_unknown_metrics_are_named(tmp_path: Path) -> None:
    history = nights(tmp_path, {"a": [1e-3, 2e-3], "b": [1e-3]})
    assert [series.candidate for series in trend_of(history, "own-error", "candidate = 'b'").series] == ["b"]
    with pytest.raises(UsageError, match="own-error, kl, accuracy, latency, lengths"):
        trend_of(history, "own-errors")
    with pytest.raises(UsageError, match="No run of these"):
        trend_of(history, "own-error", "candidate = 'c'")
    assert [trend.metric for trend in usual_trends(history)] == ["own-error"]
