"""Each hypothesis seeded as a fault in one layer and one head, and its diagnosis."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from assay.harness.attention.bugs.bug import Bug
from assay.harness.attention.bugs.family import FAMILY
from assay.harness.attention.bugs.faults import fault, rounded_oracle
from assay.harness.attention.bugs.features import BUGS
from assay.harness.attention.call import AttentionCall
from assay.harness.attention.oracle import oracle
from assay.harness.attention.sample_calls import call_of
from assay.harness.localize.causes import causes
from assay.harness.localize.diagnose import diagnose
from assay.harness.localize.guard import run_and_repeat

pytestmark = pytest.mark.usefixtures("shared_hypotheses")

LAYERS = range(4)
LAYER, HEAD = 2, 1
MATRIX = [[(24, 0)], [(70, 0)], [(20, 1)], [(20, 77)], [(9, 64)], [(33, 128)], [(40, 30), (26, 60)], [(1, 90)]]
"""Calls of each layer, as (new tokens, cached prefix): prefix x extend x batch."""

EXTRA: dict[str, list[list[tuple[int, int]]]] = {
    "q-scale-previous-block": [[(150, 20)]],
    "q-scale-next-block": [[(150, 20)]],
    **{f"sliding-window-{n}": [[(1, 5000)], [(1, n)], [(1, n - 1)]] for n in (256, 512, 1024, 2048, 4096)},
}
"""Longer calls, where a bug needs them to show."""


def louder(qk: float, v: float) -> Callable[[AttentionCall], AttentionCall]:
    return lambda call: replace(call, q=call.q * qk, k=call.k * qk, v=call.v * v)


DATA: dict[str, Callable[[AttentionCall], AttentionCall]] = {
    "values-saturate-fp8-e4m3": louder(1, 200),
    "values-saturate-fp16": louder(1, 3e4),
    "values-overflow-fp16": louder(1, 3e4),
    "scores-saturate-fp8-e4m3": louder(5, 1),
    "scores-saturate-fp16": louder(120, 1),
    "scores-overflow-fp16": louder(60, 1),
    "scale-of-head-dim-v": lambda call: replace(call, v=call.v[..., :16]),
    "values-at-key-stride": lambda call: replace(call, v=call.v[..., :16]),
}
"""What normal data must become for a bug to show."""

ALSO: dict[str, set[str]] = {
    # q head 1 of 4 on 2 kv heads: both read kv head 1 instead of 0.
    "kv-heads-interleaved": {"kv-head-next-group"},
    "kv-head-next-group": {"kv-heads-interleaved"},
}
"""Hypotheses that no call could distinguish from the seeded one, with the fault in this head only."""


def calls_for(name: str, dtype: torch.dtype = torch.float32) -> list[AttentionCall]:
    heads = (6, 3) if name == "kv-head-previous-group" else (4, 2)
    found = []
    for layer in LAYERS:
        for i, lens in enumerate(MATRIX + EXTRA.get(name, [])):
            call = call_of(lens, heads, 32, dtype, "cpu", seed=100 * layer + i)
            phase = "decode" if lens[0][0] == 1 else "extend"
            found.append(DATA.get(name, lambda call: call)(call.with_spec(layer=layer, phase=phase)))
    return found


@pytest.mark.few(3)
@pytest.mark.parametrize("hypothesis", [bug for bug in FAMILY if bug not in BUGS], ids=lambda h: h.id)
def test_a_fault_is_named_and_pinned_to_its_layer_and_head(hypothesis: Bug) -> None:
    name = hypothesis.id
    seen = run_and_repeat(fault(name, layers=[LAYER], heads=[HEAD]), calls_for(name))
    [cause] = causes(seen)
    assert {h.id for h in cause.hypotheses} == {name} | ALSO.get(name, set())
    assert (cause.layers, cause.heads, cause.spared) == ((LAYER,), (HEAD,), 0)
    [finding] = diagnose(seen)
    assert finding.id in {name} | ALSO.get(name, set())
    assert finding.severity == hypothesis.severity
    assert "layer 2 of 4, head 1 of " in finding.where


@pytest.mark.few(1)
@pytest.mark.parametrize("name", sorted(ALSO))
def test_in_all_heads_the_kv_head_bugs_are_distinguished(name: str) -> None:
    [cause] = causes(run_and_repeat(fault(name), calls_for(name)))
    assert [h.id for h in cause.hypotheses] == [name]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_without_a_fault_nothing_is_found(dtype: torch.dtype) -> None:
    assert diagnose(run_and_repeat(rounded_oracle, calls_for("", dtype))) == []


def test_a_fault_stays_where_it_was_put() -> None:
    call = call_of([(8, 0), (8, 5), (8, 16)], (4, 2), 8, torch.float32, "cpu").with_spec(layer=3)
    kernel = fault("mask-missing", layers=[3], heads=[0, 2], when=lambda new, prefix: prefix % 16 == 0)
    wrong = (kernel(call) != rounded_oracle(call)).any(-1)
    assert wrong.any(0).tolist() == [True, False, True, False]
    assert [bool(wrong[rows].any()) for rows in (slice(0, 8), slice(8, 16), slice(16, 24))] == [True, False, True]
    elsewhere = call.with_spec(layer=0)
    assert torch.equal(kernel(elsewhere), rounded_oracle(elsewhere))


def test_a_fault_sits_on_any_kernel() -> None:
    call = call_of([(8, 4)], (2, 1), 8, torch.float32, "cpu")
    kernel = fault("prefix-dropped", base_kernel=lambda call: torch.full_like(call.q, 7.0), heads=[1])
    out = kernel(call)
    assert bool((out[:, 0] == 7).all())
    assert float((out[:, 1].double() - oracle(call)[:, 1]).abs().max()) > 0.1


def test_an_unknown_bug_is_refused() -> None:
    with pytest.raises(KeyError, match="mask-top-left"):
        fault("gremlins")
