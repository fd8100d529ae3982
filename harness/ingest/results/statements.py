"""The statements of results that a claim can be about: mean scores, and figures of a benchmark."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from assay.harness.ingest.quantity import quantity
from assay.harness.ingest.results.result_set import Reading, ResultSet
from assay.harness.ingest.statement import Statement


def statements_of(reading: Reading) -> Iterator[Statement]:
    """Yield the statements of all sets of answers and of latencies, in their order."""
    for one in reading.sets:
        yield from figures(one) if one.kind == "latencies" else _score(one)


def score_names(task: str, metric: str) -> tuple[str, ...]:
    """List the names that a score may have: its task, its metric with and without the filter, both, or just a score.

    Args:
        task: such as "gsm8k".
        metric: such as "exact_match,strict-match".
    """
    short = metric.partition(",")[0]
    return tuple(dict.fromkeys((f"{task} {metric}", f"{task} {short}", task, metric, short, "score")))


def _score(result_set: ResultSet) -> Iterable[Statement]:
    if result_set.accuracy is not None:
        count = sum(item.score is not None for item in result_set.items)
        text = f"{result_set.task}: mean {result_set.metric} of {count:,} answers is {result_set.accuracy:.4f}"
        yield Statement(
            "number", score_names(result_set.task, result_set.metric), result_set.accuracy, result_set.source, text
        )


def figures(result_set: ResultSet) -> Iterable[Statement]:
    """Yield the numbers that a tool summed up itself, and those among the settings of the set."""
    for name, written in (result_set.settings | result_set.figures).items():
        try:
            value = float(written)
        except ValueError:
            continue
        names, unit = quantity(name)
        spelt = score_names(result_set.task, name) if name == "score" else (*names, f"{result_set.task} {name}")
        yield Statement("number", spelt, value, result_set.source, f"{result_set.task}: {name} {written}", unit)
