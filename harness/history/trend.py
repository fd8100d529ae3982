"""What a number did over commits and dates, and after which of them it moved."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Literal

from pydantic import ConfigDict, Field

from assay.harness.errors import UsageError
from assay.harness.history.rows import OWN_ERROR, settings_of
from assay.harness.history.table import RunTable
from assay.harness.judge.answer_length_check import LENGTH_RATIO
from assay.harness.schema import RULE, Part
from assay.harness.stats.change import change, changes
from assay.harness.stats.multiple import benjamini_hochberg
from assay.harness.text import did_you_mean

ALPHA = 0.01
"""Expected share of false alarms among the series of a trend that are said to have moved; where none moved, the rate of any."""
By = Literal["commit", "date"]
_SHORT = {
    "own-error": (OWN_ERROR,),
    "kl": ("mean-kl-cold", "mean-kl-cached"),
    "accuracy": ("candidate-accuracy",),
    "latency": ("worst-time-ratio",),
    "lengths": (LENGTH_RATIO,),
}
"""Short names of metrics."""


class Point(Part):
    """A run's number."""

    run: str = Field(description="path or URL of the run")
    created: str
    commit: str = Field(description="empty if not known")
    value: float | None = Field(description="null where it is not finite")
    low: float | None
    high: float | None
    bound: float | None


class Move(Part):
    """A change of a series' mean."""

    after: str = Field(description="commit or date before the change")
    first: str = Field(description="commit or date after it")
    index: int = Field(description="of the first point after it")
    before_mean: float
    after_mean: float
    p: float = Field(description="corrected for the number of series (Benjamini and Hochberg)")


class Series(Part):
    """One metric of one comparison: the same model, device, reference and treatment."""

    metric: str
    model: str
    candidate: str
    reference: str
    device: str
    settings: str = Field(description="what differs beside the backend, in words; empty for nothing")
    points: tuple[Point, ...] = Field(description="oldest first")
    moves: tuple[Move, ...] = Field(description="first to last; empty where none was found")

    @property
    def title(self) -> str:
        """The comparison in words."""
        of = f" against {self.reference}" if self.reference else ""
        settings = f" ({self.settings})" if self.settings else ""
        on = f" on {self.device}" if self.device else ""
        model = f", {self.model}" if self.model else ""
        return f"{self.metric}: {self.candidate}{of}{settings}{model}{on}"


class Trend(Part):
    __doc__ = f"A metric over time. {RULE}"

    schema_id: Literal["assay.trend/1"] = Field("assay.trend/1", alias="schema")
    model_config = ConfigDict(populate_by_name=True, serialize_by_alias=True)

    metric: str = Field(description="as it was asked for")
    place: str
    where: str
    by: By
    alpha: float = Field(description="rate of false discoveries of all series together")
    series: tuple[Series, ...] = Field(description="those that moved first, then those with more points")


def trend_of(history: RunTable, metric: str, where: str = "", by: By = "date") -> Trend:
    """Return what a metric did in each comparison.

    Args:
        history: the runs.
        metric: id of a metric, or one of `_SHORT`.
        where: a condition on the columns, as of `RunTable.rows`; empty for all.
        by: what a change is between: two commits, in the order in which they were first run, or two dates of runs.

    Raises:
        UsageError: no run has the metric, or `where` is no condition.
    """
    ids = _SHORT.get(metric, (metric,))
    columns = (
        "run",
        "created",
        "commit",
        "model",
        "candidate",
        "reference",
        "device",
        "treatment",
        "metric",
        "value",
        "low",
        "high",
        "bound",
    )
    rows = history.rows(where, columns)
    points: dict[tuple[str, ...], list[Point]] = {}
    for run, created, commit, model, candidate, reference, device, treatment, name, value, low, high, bound in rows:
        if name in ids and value is not None:
            key = (name, model, candidate, reference, device, treatment)
            finite = value if math.isfinite(value) else None
            point = Point(
                run=history.address(run), created=created, commit=commit, value=finite, low=low, high=high, bound=bound
            )
            points.setdefault(key, []).append(point)
    if not points:
        known = sorted({row[8] for row in (history.rows("", columns) if where else rows) if row[8]})
        raise UsageError(
            f"No run{' of these' if where else ''} in {history.place} has the metric {metric}.",
            f"one of {', '.join(_SHORT)}, or one that a run has: {', '.join(known) or 'none has any'}",
            (metric not in _SHORT and did_you_mean(metric, [*_SHORT, *known]))
            or "name another one, or look at another place",
        )
    series = [_series(key, _ordered(points, by), by) for key, points in points.items()]
    return Trend(
        metric=metric, place=history.place, where=where, by=by, alpha=ALPHA, series=tuple(_with_moves(series, by))
    )


def usual_trends(history: RunTable, where: str = "") -> list[Trend]:
    """Return the trends of those metrics of `_SHORT` that any run has."""
    there = {name for (name,) in history.rows(where, ["metric"])}
    return [trend_of(history, short, where) for short, ids in _SHORT.items() if there & set(ids)]


def _series(key: tuple[str, ...], points: list[Point], by: By) -> Series:
    metric, model, candidate, reference, device, treatment = key
    settings = settings_of(json.loads(treatment))
    return Series(
        metric=metric, model=model, candidate=candidate, reference=reference, device=device, settings=settings,
        points=tuple(points), moves=(),
    )  # fmt: skip


def _ordered(points: list[Point], by: By) -> list[Point]:
    """Order points by date; by commit, those of a commit stand together, where its first run is."""
    if by == "date":
        return sorted(points, key=lambda point: point.created)
    first: dict[str, str] = {}
    for point in points:
        first[point.commit] = min(point.created, first.get(point.commit, point.created))
    return sorted(points, key=lambda point: (first[point.commit], point.commit, point.created))


def label(point: Point, by: By) -> str:
    """Return the commit of a point, shortened, or its date, to the minute."""
    return (point.commit[:12] or "unknown commit") if by == "commit" else point.created[:16].replace("T", " ")


def _with_moves(series: list[Series], by: By) -> list[Series]:
    """Find what moved. The rate of false alarms holds for all series together."""
    tested = [_numbers(each, by) for each in series]
    corrected = _corrected(tested)
    done = []
    for each, (values, groups, indices), p in zip(series, tested, corrected, strict=True):
        moves = []
        if p <= ALPHA:
            changed = changes(values, groups, ALPHA)
            cuts = [0, *(at for at, _ in changed), len(values)]
            means = [sum(values[a:b]) / (b - a) for a, b in pairwise(cuts)]
            for (at, own_p), before, after in zip(changed, means, means[1:], strict=False):
                last, first = each.points[indices[at - 1]], each.points[indices[at]]
                moves.append(
                    Move(
                        after=label(last, by), first=label(first, by), index=indices[at], before_mean=before, after_mean=after,
                        p=max(p, own_p),
                    )
                )  # fmt: skip
        done.append(each.model_copy(update={"moves": tuple(moves)}))
    return sorted(done, key=lambda each: (not each.moves, -len(each.points), each.title))


def _corrected(tested: Sequence[tuple[list[float], list[int], list[int]]]) -> list[float]:
    """Return the p values of all series, corrected for their number."""
    p = [change(values, groups, ALPHA)[1] for values, groups, _ in tested]
    corrected = benjamini_hochberg(p)
    if min(p) <= ALPHA < min(corrected):  # more random orders than usual are needed to tell one among so many
        p = [
            change(values, groups, ALPHA / len(p))[1] if q == min(p) else q
            for q, (values, groups, _) in zip(p, tested, strict=True)
        ]
        corrected = benjamini_hochberg(p)
    return corrected


def _numbers(series: Series, by: By) -> tuple[list[float], list[int], list[int]]:
    """The finite values of a series, the number of the group of each, and its index among the points."""
    values, groups, indices = [], [], []
    group, last = 0, None
    for index, point in enumerate(series.points):
        if point.value is None:
            continue
        mark = point.commit if by == "commit" else point.created
        group += last is not None and mark != last
        last = mark
        values.append(point.value)
        groups.append(group)
        indices.append(index)
    return values, groups, indices
