from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from assay.harness.stats.paired import mcnemar_exact


@pytest.mark.parametrize(
    ("lost", "gained", "loss", "two_sided"),
    [
        # Powers of one half.
        (5, 0, 0.03125, 0.0625),
        (7, 0, 0.0078125, 0.015625),
        (10, 0, 0.0009765625, 0.001953125),
        (0, 0, 1.0, 1.0),
        (0, 7, 1.0, 0.015625),
        # Cavo et al. 2012 in Fagerland, Lydersen, Laake, Statistical Analysis of Contingency Tables, chapter 8
        (16, 6, 0.026239, 0.052479),
        # Armitage and Berry 1994, p. 127, as StatsDirect gives it
        (12, 2, 0.00647, 0.0129),
    ],
)
def test_mcnemar_of_known_cases(lost: int, gained: int, loss: float, two_sided: float) -> None:
    tests = mcnemar_exact(lost, gained)
    assert tests.loss == pytest.approx(loss, rel=5e-3)
    assert tests.two_sided == pytest.approx(two_sided, rel=5e-3)


# Above 25 + 25 a p value next to 1 rounds to 1, and no longer grows.
@given(st.integers(0, 25), st.integers(0, 25))
def test_mcnemar_mirrors_and_grows_with_losses(lost: int, gained: int) -> None:
    tests = mcnemar_exact(lost, gained)
    assert tests.two_sided == mcnemar_exact(gained, lost).two_sided
    assert mcnemar_exact(lost + 1, gained).loss < tests.loss
    assert 0 < tests.two_sided <= 1
