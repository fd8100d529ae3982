"""Numbers that tell rounded weights from others, and that survive cutting."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from assay.harness.fingerprint.weights import describe_weight, distance, rounded_to, same_numbers


@pytest.fixture
def weight() -> Tensor:
    return torch.randn(96, 64, generator=torch.Generator().manual_seed(3)) * 0.02


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn])
def test_rounded_weights_are_told_from_others(weight: Tensor, dtype: torch.dtype) -> None:
    ours = describe_weight("w", weight)
    for rounded in (weight.to(dtype), weight.to(dtype).float()):
        theirs = describe_weight("w", rounded)
        far = distance(ours, theirs)
        assert far is not None
        assert not same_numbers(far)
        assert rounded_to(ours, theirs, far) == str(dtype).removeprefix("torch.")
    other = describe_weight("w", (weight * 1.3).to(dtype))
    far = distance(ours, other)
    assert far is not None
    assert rounded_to(ours, other, far) == ""


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize(
    ("shape", "made"),
    [
        ((96, 64), lambda x: 0.02 * x),
        ((96, 64), lambda x: 0.02 * x**3),  # heavy tails
        ((96, 64), lambda x: x.sign() * (1.001 + 0.2 * x.abs())),  # the lower end of a binade
        ((96, 64), lambda x: 1e-7 * x),  # subnormal in float16
        ((96, 64), lambda x: 0.3 * x * (x > 2)),  # mostly zeros
        ((256,), lambda x: 1 + 0.1 * x),
        ((256,), lambda x: 0 * x + 1.0035),
        ((3,), lambda x: x),
        ((1,), lambda x: 0.1 + 0 * x),
    ],
)
def test_honest_rounding_stays_within_its_bound(
    shape: tuple[int, ...], made: Callable[[Tensor], Tensor], dtype: torch.dtype
) -> None:
    for seed in range(25):
        values = made(torch.randn(shape, generator=torch.Generator().manual_seed(seed)))
        ours, theirs = describe_weight(f"w{seed}", values), describe_weight(f"w{seed}", values.to(dtype))
        # As shards and fused parts are compared: by sums.
        for a, b in ((ours, theirs), [each.model_copy(update={"projections": ()}) for each in (ours, theirs)]):
            far = distance(a, b)
            assert far is not None
            assert same_numbers(far) or rounded_to(a, b, far), far


def test_a_low_rank_change_of_weights_is_not_rounding() -> None:
    """A LoRA adapter of .6 % in the norm is one and a half times what bfloat16 can round."""
    draw = torch.Generator().manual_seed(0)
    base, a, b = (torch.randn(shape, generator=draw) for shape in ((512, 512), (512, 8), (8, 512)))
    delta = a @ b
    ours = describe_weight("w", base + delta * (0.006 * base.norm() / delta.norm()))
    theirs = describe_weight("w", base.bfloat16())
    far = distance(ours, theirs)
    assert far == pytest.approx(0.0062, rel=0.3)
    assert far is not None
    assert rounded_to(ours, theirs, far) == ""


def test_projections_estimate_the_distance(weight: Tensor) -> None:
    """The mean of the squared estimates of 40 pairs is the true square; its standard error is 0.1."""
    ratios = []
    for seed in range(40):
        noise = torch.randn(weight.shape, generator=torch.Generator().manual_seed(seed)) * 0.001
        far = distance(describe_weight(f"w{seed}", weight), describe_weight(f"w{seed}", weight + noise))
        assert far is not None
        ratios.append(far**2 / float(noise.norm() / weight.norm()) ** 2)
    assert sum(ratios) / len(ratios) == pytest.approx(1.0, abs=0.25)


def test_the_same_numbers_elsewhere_have_the_same_digest(weight: Tensor) -> None:
    assert describe_weight("a", weight).digest == describe_weight("a", weight.clone()).digest
    assert describe_weight("a", weight).projections != describe_weight("b", weight).projections


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_one_changed_element_of_a_large_parameter_shows(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    """Beyond the sampled elements, which are hashed, each element is in the projections."""
    monkeypatch.setattr("assay.harness.fingerprint.weights._WHOLE", 100)
    monkeypatch.setattr("assay.harness.fingerprint.weights._SAMPLE", 16)
    large = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    changed = large.clone()
    changed[3, 5] += 0.5
    ours, theirs = describe_weight("w", large.to(dtype)), describe_weight("w", changed.to(dtype))
    assert ours.digest == theirs.digest
    far = distance(ours, theirs)
    assert far is not None
    assert not same_numbers(far)


def test_the_grid_is_the_narrowest_exact_float(weight: Tensor) -> None:
    assert describe_weight("w", weight).grid == "float32"
    assert describe_weight("w", weight.bfloat16().float()).grid == "bfloat16"
    assert describe_weight("w", torch.arange(8)).grid == "int64"


@pytest.mark.parametrize("tensor", [torch.zeros(0, 4), torch.zeros(3), torch.ones(2, 2, 2), torch.tensor(1.0)])
def test_odd_shapes_are_described(tensor: Tensor) -> None:
    described = describe_weight("w", tensor)
    assert described.shape == tuple(tensor.shape)
    assert distance(described, described) in (None, 0.0)


@pytest.mark.parametrize("rows", [1, 57])
def test_rows_of_zeros_behind_an_embedding_are_no_difference(weight: Tensor, rows: int) -> None:
    plain = describe_weight("embedding", weight)
    zeros = describe_weight("embedding", torch.cat([weight, weight.new_zeros(rows, weight.shape[1])]))
    far = distance(plain, zeros)
    assert far is not None
    assert same_numbers(far)
    more = describe_weight("embedding", torch.cat([weight, weight[:rows]]))
    assert distance(plain, more) is None
    other = describe_weight("embedding", torch.cat([1.01 * weight, weight.new_zeros(rows, weight.shape[1])]))
    assert distance(plain, other) is None
