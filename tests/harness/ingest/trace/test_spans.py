"""Begins and ends of Chrome trace events, matched."""

from __future__ import annotations

from typing import Any

import pytest

from assay.harness.ingest.trace.spans import Spans


def spans_of(*events: dict[str, Any]) -> Spans:
    spans = Spans()
    for number, event in enumerate(events, 1):
        assert spans.add(number, {"pid": 1, "tid": 1, **event})
    return spans


def short(spans: Spans) -> list[tuple[str, float, float, int]]:
    return [(span.name, span.ts, span.dur, span.number) for span in spans.all]


def test_nested_spans_by_name_and_without() -> None:
    spans = spans_of(
        {"ph": "B", "name": "a", "ts": 1}, {"ph": "B", "name": "b", "ts": 2}, {"ph": "E", "ts": 3},
        {"ph": "E", "name": "a", "ts": 5},
    )  # fmt: skip
    assert short(spans) == [("b", 2, 1, 2), ("a", 1, 4, 1)]
    assert spans.violations() == []


def test_spans_of_other_threads_are_kept_apart() -> None:
    spans = spans_of({"ph": "B", "name": "a", "ts": 1}, {"ph": "E", "name": "a", "ts": 2, "tid": 2})
    broken = [("trace-end-not-begun", (2,)), ("trace-begin-not-closed", (1,))]
    assert [(one.rule, one.places) for one in spans.violations()] == broken


def test_asynchronous_spans_by_their_id() -> None:
    begin, end = {"ph": "b", "cat": "c", "name": "r"}, {"ph": "e", "cat": "c", "name": "r"}
    spans = spans_of(
        {**begin, "id": "1", "ts": 1}, {**begin, "id": "2", "ts": 2}, {"ph": "n", "name": "tick", "ts": 2},
        {**end, "id": "1", "ts": 5, "tid": 9}, {**end, "id": "3", "ts": 6},
    )  # fmt: skip
    assert ("r", 1, 4, 1) in short(spans)
    assert [(one.rule, one.places) for one in spans.violations()] == [
        ("trace-end-not-begun", (5,)),
        ("trace-begin-not-closed", (2,)),
    ]


def test_an_end_before_a_begin_of_the_same_microsecond_is_mlc_llms_sorting() -> None:
    spans = spans_of({"ph": "E", "name": "a (0)", "ts": 7}, {"ph": "B", "name": "a (0)", "ts": 7})
    assert short(spans) == [("a (0)", 7, 0, 2)]
    assert spans.violations() == []


def test_an_end_before_a_later_begin_is_not() -> None:
    spans = spans_of({"ph": "E", "name": "a (0)", "ts": 7}, {"ph": "B", "name": "a (0)", "ts": 8})
    assert [one.rule for one in spans.violations()] == ["trace-end-not-begun", "trace-begin-not-closed"]


def test_the_instant_finish_of_mlc_llm_is_no_end() -> None:
    spans = spans_of({"ph": "E", "name": "(0)", "ts": 7})
    assert short(spans) == [("finish", 7, 0, 1)]


@pytest.mark.parametrize(
    "event",
    [
        None, 3, [], {}, {"ph": 1}, {"ph": "?"}, {"ph": "XX"}, {"ph": ""}, {"ph": "X", "name": "a", "ts": 1},
        {"ph": "X", "name": "a", "ts": 1, "dur": -1}, {"ph": "X", "name": "a", "dur": 1}, {"ph": "X", "ts": 1, "dur": 1},
        {"ph": "X", "name": "a", "ts": "1", "dur": 1}, {"ph": "X", "name": "a", "ts": float("nan"), "dur": 1},
        {"ph": "X", "name": "a", "ts": 10**400, "dur": 1}, {"ph": "B", "ts": 1}, {"ph": "i", "name": 3, "ts": 1},
    ],
)  # fmt: skip
def test_what_is_no_event_is_not_understood(event: Any) -> None:
    spans = Spans()
    assert not spans.add(1, event)
    assert spans.all == []


def test_correlations_of_any_type() -> None:
    event = {"ph": "X", "name": "k", "cat": "kernel", "ts": 1, "dur": 1}
    spans = spans_of(*({**event, "args": {"correlation": value}} for value in (5, -5, "5", 1 << 70, None)), {**event, "args": []})
    assert [span.correlation for span in spans.all] == [5, -1, -1, -1, -1, -1]
