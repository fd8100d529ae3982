"""What several processes hold, joined: parts are compared by process, or by sums with the whole."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from assay.harness.evidence.fingerprint import Fingerprint, Weight
from assay.harness.fingerprint.differences import compare_fingerprints
from assay.harness.fingerprint.weights import describe_weight, distance, joined, same_numbers, weights_of


@pytest.fixture
def weight() -> Tensor:
    return torch.randn(96, 64, generator=torch.Generator().manual_seed(3)) * 0.02


def rank(*weights: Weight) -> Fingerprint:
    return Fingerprint(source="server", engine="e", model="m", weights=weights)


def merged(*parts: Weight) -> Weight:
    (made,) = joined([rank(part) for part in parts]).weights or ()
    return made


def says(left: Weight, right: Weight) -> list[str]:
    diff = compare_fingerprints(rank(left), rank(right))
    return [*(difference.name for difference in diff.differences), *diff.not_compared.keys() & {"weights.order"}]


OTHERS: dict[str, Callable[[Tensor], Tensor]] = {
    "rows": lambda weight: weight.flip(0),
    "columns": lambda weight: weight.flip(1),
    "two rows of one part": lambda weight: weight[[1, 0, *range(2, 96)]],
    "two rows of two parts": lambda weight: weight[[95, *range(1, 95), 0]],
    "two columns of two parts": lambda weight: weight[:, [63, *range(1, 63), 0]],
}


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("other", OTHERS)
def test_parts_are_compared_with_those_of_the_same_rank(weight: Tensor, dim: int, other: str) -> None:
    ours, theirs = (
        merged(*(describe_weight("w", part) for part in each.chunk(2, dim))) for each in (weight, OTHERS[other](weight))
    )
    assert says(ours, ours) == []
    assert len(ours.held) == 2
    assert says(ours, theirs) == ["weights.order"]
    exchanged = ours.model_copy(update={"held": ours.held[::-1], "digest": "other"})
    assert says(ours, exchanged) == ["weights.order"]


def test_parts_have_no_order_beside_the_whole(weight: Tensor) -> None:
    whole, parts = describe_weight("w", weight), merged(*(describe_weight("w", part) for part in weight.flip(0).chunk(2)))
    assert says(whole, parts) == ["weights.order"]
    diff = compare_fingerprints(rank(whole), rank(parts))
    assert diff.differences == ()
    assert diff.not_compared["weights.order"].startswith("of w: not known which parts each rank holds; compare")


class RMSNorm(torch.nn.Module):
    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(weight)


def test_copies_that_differ_are_wrong(weight: Tensor) -> None:
    (ours,), (theirs,) = (weights_of(RMSNorm(each)) for each in (weight, weight.flip(0)))
    assert merged(ours, ours).copies_differ is False
    assert says(ours, merged(ours, theirs)) == ["weights.wrong"]
    (linear,), (other,) = (weights_of(torch.nn.Linear(*each.shape[::-1], bias=False)) for each in (weight, weight))
    assert merged(linear, other).copies_differ is False, "parts of a matrix"


@pytest.mark.parametrize("dim", [0, 1])
def test_sums_survive_sharding(weight: Tensor, dim: int) -> None:
    whole = describe_weight("w", weight)
    parts = merged(*(describe_weight("w", part) for part in weight.chunk(2, dim)))
    far = distance(whole, parts)
    assert far is not None
    assert same_numbers(far)
    assert parts.ranks == 2
    other = merged(*(describe_weight("w", part * 1.01) for part in weight.chunk(2, dim)))
    far = distance(whole, other)
    assert far is not None
    assert not same_numbers(far)


@pytest.mark.parametrize("value", [0.0, 1.0, -0.3])
def test_equal_shards_of_one_value_are_the_whole(value: float) -> None:
    whole, shard = (describe_weight("bias", torch.full((size,), value)) for size in (512, 256))
    far = distance(whole, merged(shard, shard))
    assert far is not None
    assert same_numbers(far)
    for other in (
        torch.full((256,), value + 0.1),
        torch.full((200,), value),
        torch.linspace(-1, 1, 256),
        torch.tensor([value, 1 - value]),
    ):
        assert distance(whole, describe_weight("bias", other)) is None


def test_equal_shards_are_the_whole(weight: Tensor) -> None:
    experts = torch.stack([weight] * 4)
    whole, halves = describe_weight("experts", experts), describe_weight("experts", experts[:2])
    far = distance(whole, merged(halves, halves))
    assert far is not None
    assert same_numbers(far)
    experts[3, 5, 7] += 0.1
    assert distance(describe_weight("experts", experts), halves) is None
    assert distance(whole, describe_weight("experts", weight[:, :40])) is None
    assert distance(whole, describe_weight("experts", -experts[:2])) is None


def test_what_each_process_holds_whole_is_kept(weight: Tensor) -> None:
    described = describe_weight("norm", weight)
    assert merged(described, described) == described


def test_a_large_parameter_that_ranks_hold_whole_but_not_alike_is_not_kept(monkeypatch: pytest.MonkeyPatch, weight: Tensor) -> None:
    monkeypatch.setattr("assay.harness.fingerprint.weights._WHOLE", 100)
    monkeypatch.setattr("assay.harness.fingerprint.weights._SAMPLE", 16)
    other = weight.clone()
    other[1] = 0
    parts = describe_weight("norm", weight), describe_weight("norm", other)
    assert parts[0].digest == parts[1].digest
    assert merged(parts[0], parts[0]).ranks == 1
    assert merged(*parts).ranks == 2


def test_position_ids_are_those_of_the_rank_that_computed_the_request() -> None:
    ranks = [rank().model_copy(update={"positions": positions}) for positions in ((), (0, 1, 2))]
    assert joined(ranks).positions == (0, 1, 2)
    assert joined(ranks[:1]).positions == ()
    assert joined([rank(), rank()]).positions is None
