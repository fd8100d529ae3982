"""Two serving benchmarks -> ratios of latencies, B over A, request by request.

Requests are paired by their place: the benchmark draws them with a seed, so the same settings give the same requests. How much
two runs of A differ is only known from a second run of A (the benchmark appends to its file): without it there is a ratio and no
verdict, by the rule of `assay.harness.stats.ratio`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median

from assay.harness.ingest.results.comparison import ComparedLatency, requirement
from assay.harness.ingest.results.result_set import ResultSet
from assay.harness.stats.ratio import Ratio, RatioDecision, decide_ratios, ratio_of
from assay.harness.verdict import Check

_TITLES = {"ttft": "time to the first token", "tpot": "time per output token", "e2e": "time of a request"}
_MOST_PAIRS = 1_000
"""Pairs that a ratio is taken from, evenly chosen: the estimate sorts the means of all pairs of them."""


def compare_latencies(
    a: Sequence[ResultSet], b: Sequence[ResultSet], bound: float, alpha: float
) -> tuple[tuple[ComparedLatency, ...], list[Check]]:
    """Compute the ratio of each quantity, and the checks of a pass.

    Args:
        a: runs of the accepted server, in order; the second gives the floor.
        b: runs of the new one; the last counts.
        bound: largest ratio that passes, at least 1.
        alpha: error rate of each interval, and of a false regression in any of the ratios.
    """
    if not (a and b):
        return (), [_needs("runs", "both files hold a run", "a file holds none", "one of each")]
    first, last = a[0], b[-1]
    differing = _settings_that_differ(first, last)
    listed = bool(first.requests and last.requests)
    paired = listed and len(first.requests) == len(last.requests)
    other = sum(x != y for x, y in zip(first.requests, last.requests, strict=False)) if paired else 0
    lengths = f"{len(first.requests):,} and {len(last.requests):,} requests, {other:,} of other lengths"
    failed = f"{first.failed:,} in A and {last.failed:,} in B failed" if first.failed or last.failed else ""
    checks = [
        _needs("same-load", "both ran the same load", "; ".join(differing), "the same settings"),
        _needs(
            "requests-listed",
            "the times of single requests are there",
            "" if listed else "only summaries: run the benchmark with --output-details",
            f"{len(first.requests):,} requests",
        ),
        _needs(
            "same-requests",
            "the requests are the same",
            "" if not listed or (paired and not other) else lengths,
            "the same tokens in and out",
        ),
        _needs("none-failed", "no request failed", failed, "none"),
        _needs("all-timed", "every request has its time", _untimed(first, last), f"{len(first.requests):,} requests"),
    ]
    if not paired or differing:
        return (), checks
    return _rows(a, last, bound, alpha), checks


def _settings_that_differ(a: ResultSet, b: ResultSet) -> list[str]:
    """List the settings of the load that two runs do not share."""
    return [
        f"{key} {a.settings.get(key, 'unknown')} and {b.settings.get(key, 'unknown')}"
        for key in dict.fromkeys((*a.settings, *b.settings))
        if key != "tag" and a.settings.get(key) != b.settings.get(key)
    ]


def _untimed(*runs: ResultSet) -> str:
    """Describe requests that did not fail and lack a time to the first token: the benchmark writes 0 where it saw no token."""
    counts = [sum(s is None for s in run.latencies.get("ttft", ())) - run.failed for run in runs]
    return f"{counts[0]:,} in A and {counts[1]:,} in B have none, and are left out" if any(counts) else ""


def _rows(a: Sequence[ResultSet], last: ResultSet, bound: float, alpha: float) -> tuple[ComparedLatency, ...]:
    first = a[0]
    again = next(
        (later for later in a[1:] if later.requests == first.requests and not _settings_that_differ(first, later)), None
    )
    measured = {
        name: (_logs(name, first, last), _logs(name, first, again) if again else []) for name in first.latencies
    }
    decided = decide_ratios(list(measured.values()), bound, alpha)
    return tuple(
        _row(name, first, last, decision, logs, alpha, again is not None)
        for (name, (logs, _)), decision in zip(measured.items(), decided, strict=True)
    )


def _logs(name: str, a: ResultSet, b: ResultSet) -> list[float]:
    """Log ratios of the requests that have this time in both, and had the same lengths."""
    logs = [
        math.log(y / x)
        for x, y, p, q in zip(a.latencies[name], b.latencies[name], a.requests, b.requests, strict=True)
        if x and y and p == q
    ]
    step = max(1, math.ceil(len(logs) / _MOST_PAIRS))
    return logs[::step]


def _row(
    name: str, a: ResultSet, b: ResultSet, decision: RatioDecision, logs: Sequence[float], alpha: float, has_floor: bool
) -> ComparedLatency:
    ratio: Ratio = ratio_of(logs, alpha)
    why = decision.why
    if not has_floor and logs:
        why = (
            f"{ratio.value:.3f} ({ratio.interval.low:.3f} to {ratio.interval.high:.3f} with {100 * ratio.interval.level:.0f} % "
            "confidence), but how much two runs of A differ is not known. To resolve: run A's benchmark again into the same file."
        )
    return ComparedLatency(
        id=name,
        title=_TITLES[name],
        verdict=decision.verdict,
        why=why,
        pairs=len(logs),
        ratio=ratio.value if logs else None,
        low=ratio.interval.low if logs else None,
        high=ratio.interval.high if logs and math.isfinite(ratio.interval.high) else None,
        floor=decision.floor.value if has_floor else None,
        a_median=_median(a.latencies[name]),
        b_median=_median(b.latencies[name]),
    )


def _median(latencies: Sequence[float | None]) -> float | None:
    times = [seconds for seconds in latencies if seconds is not None]
    return median(times) if times else None


def _needs(id: str, title: str, wrong: str, right: str) -> Check:
    return requirement(id, title, wrong, right, "run the same benchmark on both")
