from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from assay.harness.conditions import CACHED_PREFIX, PLACE, POSITION
from assay.harness.evidence.error_table import (
    CONDITIONS,
    DISTANCE,
    SUMS,
    ErrorTable,
    Floats,
    RoleErrors,
    condition_numbers,
    elements,
    gain,
    joined,
    ratio,
    relative_l1,
    sums_of,
)
from assay.harness.stats import error_sums

SHAPE = tuple(len(labels) for labels in CONDITIONS.values())
NONFINITE, UNDEFINED = SUMS.index("nonfinite"), SUMS.index("undefined")
NAN, INF = math.nan, math.inf


def sums(out: list[float], expected: list[float]) -> Floats:
    """The sums of both implementations, which agree but where infinity is expected."""
    found = sums_of(np.array(out), np.array(expected), (0,))
    of_tensors = error_sums.query_sums(torch.tensor([[out]]), torch.tensor([[expected]]))[0, 0]
    assert of_tensors[: len(DISTANCE)].tolist() == pytest.approx(found.tolist())
    if len(out):
        assert float(error_sums.relative_l1(of_tensors)) == relative_l1(found)
    return of_tensors.numpy()


@pytest.mark.parametrize(
    ("out", "expected", "error", "scaled", "counted"),
    [
        ([1.0, 2.0, 3.0, 6.0], [1.0, 2.0, 3.0, 4.0], 0.2, 8 / 30, 4),
        ([-1.0, 2.0], [1.0, -2.0], 2.0, -2.0, 2),
        ([0.0] * 4, [0.0] * 4, 0.0, NAN, 4),
        ([1.0] * 4, [0.0] * 4, INF, NAN, 4),
        ([0.0] * 4, [1.0] * 4, 1.0, -1.0, 4),
        ([NAN, INF, 1.0, 2.0, 5.0], [1.0, 1.0, 1.0, 1.0, NAN], INF, INF, 4),
        ([NAN, 2.0], [NAN, 1.0], 1.0, 1.0, 1),
    ],
)
def test_known_figures(out: list[float], expected: list[float], error: float, scaled: float, counted: int) -> None:
    found = sums(out, expected)
    assert relative_l1(found) == pytest.approx(error)
    assert gain(found) == pytest.approx(scaled, nan_ok=True)
    assert elements(found) == counted
    assert float(error_sums.slope(torch.from_numpy(found))) == pytest.approx(1 + scaled if scaled < INF else NAN, nan_ok=True)


def test_sums_are_merged_and_ratios_are_not() -> None:
    first, second = sums([1.0, 2.0], [1.0, 1.0]), sums([5.0], [4.0])
    assert relative_l1(first + second) == pytest.approx(2 / 6)
    assert np.isnan(relative_l1(np.zeros(len(SUMS))))


def test_infinity_in_what_is_expected_matches_what_is_not_finite() -> None:
    found = error_sums.query_sums(torch.tensor([[5.0], [NAN], [1.0], [NAN]]), torch.tensor([[NAN], [INF], [INF], [1.0]]))
    assert error_sums.relative_l1(found).tolist() == [0.0, 0.0, INF, INF]
    assert found[:, UNDEFINED].tolist() == [1, 0, 0, 0]


def test_half_precision_is_compared_in_float64() -> None:
    ones = np.ones(70000, np.float16)
    assert relative_l1(sums_of(ones, 2 * ones, (0,))) == 0.5  # the sum alone is beyond fp16


@pytest.mark.parametrize("array", [np.array, torch.tensor])
def test_a_ratio_of_arrays_and_of_tensors(array: type) -> None:
    assert ratio(array([0.0, 0.0, 1.0, 1.0]), array([0.0, 2.0, 0.0, 4.0])).tolist() == [0.0, 0.0, INF, 0.25]  # type: ignore[attr-defined]


def labels_of(phase: str, new: list[int], prefix: list[int]) -> list[tuple[str, str, str]]:
    _, prefixes, positions, places = np.unravel_index(condition_numbers(phase, new, prefix), SHAPE)
    return [(CACHED_PREFIX.labels[a], POSITION.labels[b], PLACE[c]) for a, b, c in zip(prefixes, positions, places, strict=True)]


def test_conditions_of_every_query() -> None:
    assert labels_of("extend", [2, 1, 1, 1], [0, 1, 15, 16]) == [
        ("0", "0", "first"), ("0", "1-15", "first"), ("1", "0", "between"), ("2-15", "0", "between"), (">= 16", "0", "last"),
    ]  # fmt: skip
    long = labels_of("extend", [257], [2])
    assert [long[i] for i in (15, 16, 63, 64, 255, 256)] == [
        ("2-15", label, "only") for label in ("1-15", "16-63", "16-63", "64-255", "64-255", ">= 256")
    ]
    assert set(np.unravel_index(condition_numbers("decode", [1, 1], [3, 9]), SHAPE)[0]) == {1}


def table(index: list[list[int]], distances: list[tuple[float, float, int]]) -> ErrorTable:
    return ErrorTable.of(np.array(index), np.array([[*distance, 0.0, 0.0] for distance in distances]))


def test_distances_are_added_up_over_selected_cells() -> None:
    cells = table([[0, 0, 0, 0, 0, 0], [0, 0, 0, 3, 0, 0]], [(1.0, 2.0, 1), (0.0, 98.0, 99)])
    assert relative_l1(cells.distance()).tolist() == [[pytest.approx(1 / 100)]]
    assert relative_l1(cells.distance(("prefix",)))[[0, 3]].tolist() == [0.5, 0.0]
    assert np.isnan(relative_l1(cells.distance(("prefix",)))[[1, 2]]).all()
    assert elements(cells.distance(())) == 100
    assert relative_l1(cells.distance(("head",), {"prefix": ">= 16"})).tolist() == [0.0]


def test_a_cell_that_was_not_observed_is_not_zero() -> None:
    cells = table([[0, 1, 0, 0, 0, 0], [2, 0, 0, 0, 0, 0]], [(1.0, 2.0, 1)] * 2)
    assert np.isnan(relative_l1(cells.distance())).tolist() == [[True, False], [True, True], [False, True]]
    assert cells.observed("phase") == ("extend",)
    assert np.isnan(relative_l1(cells.distance(where={"phase": "decode"}))).all()


@pytest.mark.parametrize(("by", "where"), [(("colour",), {}), (("layer",), {"phase": "train"}), (("head",), {"layer": "9"})])
def test_unknown_dimensions_and_labels_are_refused(by: tuple[str, ...], where: dict[str, str]) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - each comes from another lookup
        table([[0, 0, 0, 0, 0, 0]], [(1.0, 2.0, 1)]).distance(by, where)


def test_tables_are_joined_by_adding_sums_and_keeping_the_worse_query() -> None:
    index = np.array([[0, 0, 0, 0, 0, 0], [0, 1, 0, 0, 0, 0]])

    def role(value: float, members: int, worst: float) -> RoleErrors:
        own = np.full((2, len(SUMS)), value)
        return RoleErrors(own, 0 * own, np.full((2, members, len(SUMS)), value), np.array([[worst, 1.0, 4.0, worst, 0.0]] * 2))

    distance = np.ones((2, len(DISTANCE)))
    first = ErrorTable.of(index, distance, role(1.0, 3, 0.5), role(1.0, 3, 2.0))
    second = ErrorTable.of(index[::-1], 2 * distance, role(2.0, 2, 3.0), role(2.0, 2, 0.1))
    apart = ErrorTable.of(index[:1], distance[:1])  # nothing of it was compared with the truth
    found = joined([first, second, apart])
    assert found.index.tolist() == index.tolist()
    assert found.apart[:, 0].tolist() == [4.0, 3.0]
    assert found.candidate.honest.tolist() == np.full((2, 2, len(SUMS)), 3.0).tolist()
    assert (found.candidate.worst[:, 0] == 3.0).all()
    assert (found.exchanged().candidate.worst[:, 0] == 2.0).all()
    assert found.merged((0,)).index.tolist() == [[0, -1, -1, -1, -1, -1]]
    assert not len(joined([]).index)


def test_exchanged_roles_exchange_what_is_not_finite() -> None:
    cells = ErrorTable.of(np.zeros((1, 6), np.int64), np.array([[1.0, 2.0, 3.0, 0.0, 5.0]]))
    assert relative_l1(cells.apart).tolist() == [0.5]
    assert relative_l1(cells.exchanged().apart).tolist() == [INF]
