"""The test of a changed mean keeps its rate of false alarms, whatever the distribution, and finds what changed."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray

from assay.harness.stats.change import change, changes
from assay.harness.stats.multiple import benjamini_hochberg

Draw = Callable[[np.random.Generator, int], NDArray[np.float64]]
DRAWS: dict[str, Draw] = {
    "normal": lambda random, n: random.normal(size=n),
    "heavy tails": lambda random, n: random.standard_t(2, size=n),
    "skewed": lambda random, n: np.exp(2 * random.normal(size=n)),
    "ties": lambda random, n: random.integers(0, 3, size=n).astype(float),
}


@pytest.mark.parametrize("n", [12, 30])
@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS.keys())
def test_false_alarms_are_as_rare_as_stated(draw: Draw, n: int) -> None:
    random, series, alpha = np.random.default_rng(n), 600, 0.05
    found = sum(bool(changes(list(draw(random, n)), range(n), alpha)) for _ in range(series))
    # More than the mean by 3 standard deviations of a rate of alpha.
    assert found <= series * alpha + 3 * (series * alpha * (1 - alpha)) ** 0.5
    assert found > 0, "a test that never rejects finds nothing"


def test_a_change_is_found_where_it_is() -> None:
    random, near = np.random.default_rng(1), 0
    for _ in range(50):
        x = np.concatenate([random.normal(0, 1, 20), random.normal(3, 1, 12)])
        at, p = next(iter(changes(list(x), range(32), 0.01)), (0, 1.0))
        near += abs(at - 20) <= 1 and p <= 0.01
    assert near >= 45


def test_two_changes_are_found_first_to_last() -> None:
    random = np.random.default_rng(2)
    x = np.concatenate([random.normal(m, 0.1, 12) for m in (0, 1, 3)])
    assert [at for at, _ in changes(list(x), range(36), 0.01)] == [12, 24]


def test_a_change_is_between_two_groups() -> None:
    x = [0.0, 0.1, 0.2, 0.1, 5.0, 5.1, 5.05, 4.9, 5.2, 5.1]
    groups = [0, 0, 0, 1, 1, 1, 2, 2, 2, 2]
    assert change(x, groups, 0.05)[0] == 3, "not 4, which is within the second commit"


@pytest.mark.parametrize(("x", "groups"), [([1.0] * 9, list(range(9))), ([1.0, 2.0], [0, 0]), ([], []), ([3.0], [0])])
def test_what_cannot_have_changed_has_not(x: list[float], groups: list[int]) -> None:
    assert change(x, groups, 0.05) == (0, 1.0)


def test_the_false_discovery_rate_is_kept_and_equals_that_of_statsmodels() -> None:
    multitest = pytest.importorskip("statsmodels.stats.multitest")
    random = np.random.default_rng(3)
    for n in (1, 2, 50):
        p = list(random.uniform(size=n) ** 3)
        assert benjamini_hochberg(p) == pytest.approx(list(multitest.multipletests(p, method="fdr_bh")[1]))
