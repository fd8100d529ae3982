from __future__ import annotations

import re
from collections import Counter

import pytest
import torch
from fault_catalogue import CATALOGUE, SeededFault, Where

from assay.harness.attention.bugs.family import BY_ID
from assay.harness.attention.bugs.faults import rounded_oracle
from assay.harness.attention.call import AttentionCall
from assay.harness.attention.sample_calls import call_of

FAULTS = [fault for fault in CATALOGUE.values() if not fault.equivalent]


def seeded(where: Where) -> SeededFault:
    """A fault that makes every output zero."""
    return SeededFault("zero", "zero", "no output", lambda call, out: torch.zeros_like(out), where=where)


def call(lens: list[tuple[int, int]], layer: int = 0, phase: str = "extend") -> AttentionCall:
    return call_of(lens, (4, 2), 8, torch.float32, "cpu").with_spec(layer=layer, phase=phase)


def changed(where: Where, one: AttentionCall) -> torch.Tensor:
    """Queries and heads that the fault changes, bool [total_q, num_q_heads]."""
    out = rounded_oracle(one)
    return (seeded(where).apply(one, out) != out).any(-1)


def test_the_catalogue_is_large_and_its_ids_are_unique() -> None:
    assert len(FAULTS) >= 60
    assert len(CATALOGUE) - len(FAULTS) >= 10
    assert all(id == fault.id and re.fullmatch(r"[a-z0-9.]+(-[a-z0-9.]+)*", id) for id, fault in CATALOGUE.items())
    assert all(count == 1 for count in Counter(fault.title for fault in CATALOGUE.values()).values())


def test_links_are_reports_and_most_faults_model_one() -> None:
    links = [link for fault in CATALOGUE.values() for link in fault.links]
    assert all(re.fullmatch(r"https://github\.com/[\w.-]+/[\w.-]+/(issues|pull)/\d+", link) for link in links)
    assert len(set(links)) >= 50
    assert sum(bool(fault.links) for fault in FAULTS) >= 40


def test_hypotheses_exist() -> None:
    assert all(fault.hypothesis in BY_ID for fault in CATALOGUE.values() if fault.hypothesis)


def test_every_restriction_is_in_use() -> None:
    for restriction in ("layers", "heads", "phase", "new", "prefix", "length", "batch", "from_call", "share"):
        default = getattr(Where(), restriction)
        assert any(getattr(fault.where, restriction) != default for fault in FAULTS), restriction


def test_a_fault_does_not_write_to_the_right_output() -> None:
    one = call([(70, 64), (20, 0)])
    out = rounded_oracle(one)
    before = out.clone()
    for fault in CATALOGUE.values():
        fault.restart()
        fault.apply(one, out)
        assert torch.equal(out, before), fault.id


def test_layers_heads_and_phases_restrict() -> None:
    assert not changed(Where(layers=(2,)), call([(3, 0)], layer=1)).any()
    assert changed(Where(layers=(2,)), call([(3, 0)], layer=2)).all()
    assert changed(Where(heads=(-1,)), call([(3, 0)])).any(0).tolist() == [False, False, False, True]
    assert not changed(Where(phase="decode"), call([(3, 0)])).any()


@pytest.mark.parametrize(
    ("where", "second"),
    [
        (Where(new=(5, None)), True),
        (Where(new=(0, 4)), False),
        (Where(prefix=(1, None)), True),
        (Where(length=(0, 8)), False),
        (Where(unaligned=4), True),
    ],
)
def test_sequences_restrict(where: Where, second: bool) -> None:
    rows = changed(where, call([(4, 0), (6, 3)])).all(1)
    assert bool(rows[4:].all()) is second
    assert bool(rows[:4].any()) is not second


def test_batches_restrict() -> None:
    assert not changed(Where(batch=(2, None)), call([(4, 0)])).any()
    assert changed(Where(batch=(2, None)), call([(4, 0), (4, 0)])).all()


def test_calls_are_counted_by_layer_and_phase_until_a_restart() -> None:
    fault = seeded(Where(from_call=2))
    outs = [rounded_oracle(call([(3, 0)], layer)) for layer in (0, 1)]

    def wrong(layer: int) -> bool:
        return not torch.equal(fault.apply(call([(3, 0)], layer), outs[layer]), outs[layer])

    assert [wrong(0), wrong(1), wrong(0), wrong(0), wrong(1)] == [False, False, False, True, False]
    fault.restart()
    assert [wrong(0) for _ in range(3)] == [False, False, True]


def test_a_share_of_calls_is_drawn_by_its_seed() -> None:
    def drawn(seed: int) -> list[bool]:
        fault, one = seeded(Where(share=0.2, seed=seed)), call([(1, 2)])
        out = rounded_oracle(one)
        return [not torch.equal(fault.apply(one, out), out) for _ in range(500)]

    once = drawn(1)
    assert once == drawn(1) != drawn(2)
    assert 60 < sum(once) < 140
