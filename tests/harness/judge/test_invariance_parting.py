"""Where in the model a set of features parts from its base: from traces on disk, or why it was not observed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from assay.harness.evidence.invariance import InvarianceFolder
from assay.harness.evidence.probes import ProbePass, TracedPlace
from assay.harness.evidence.trace import TraceHeader, write_pass, write_refusal
from assay.harness.judge.invariance import judge_invariance
from assay.harness.judge.invariance_result import InvarianceResult
from assay.harness.statement import Statement, state

LAYERS = (3, 7)
"""Those that have attention: the others are recurrent."""
PLACE = TracedPlace(probe="0+8", index=12)
Spoil = Callable[[dict[str, torch.Tensor]], None]
Judge = Callable[..., InvarianceResult]


def unobserved(why: str) -> Statement:
    return state("inside-not-observed", why=why, said="")


def write(folder: InvarianceFolder, record: ProbePass, spoil: Spoil = lambda kept: None) -> None:
    """Write the trace of a pass: the same numbers each time, before they are spoiled."""
    generator, kept = torch.Generator().manual_seed(0), {}
    for layer in LAYERS:
        for name, heads in (("q.", 4), ("new_k.", 2), ("new_v.", 2), ("k.", 2), ("v.", 2), ("layer.", 4), ("after.", 1)):
            kept[f"{name}{layer}"] = torch.randn(PLACE.index, heads, 8, generator=generator)
    spoil(kept)
    header = TraceHeader(run=folder.nonce, request="x", phase="extend", number=0, rank=0, ranks=1)
    positions = torch.arange(PLACE.index)
    write_pass(folder.server_folder(record.server), record.label, positions + 50, positions, kept, header)


@pytest.fixture
def judged(tmp_path: Path, arm_records: ModuleType) -> Judge:
    """Judges a feature that differs in its first generated token, and whose pass and base were traced."""

    def judge(
        spoil: Spoil | None = None, traced_kl: float = 0.5, verifications: int = 0, again_kl: float | None = None, **arm: Any
    ) -> InvarianceResult:
        folder = InvarianceFolder.new(tmp_path / "out")
        own = [
            arm_records.arm(number=3, why="trace"),
            arm_records.arm(number=4, why="trace again", decode=again_kl or 0.0),
            arm_records.arm("page-size", number=5, why="trace", decode=traced_kl, verifications=verifications),
        ]
        own = [record.model_copy(update={"traced": PLACE}) for record in own]
        arms = [arm_records.arm("page-size", **{"decode": 0.5} | arm), *(own if spoil else ())]
        arm_records.write(folder, arms, arms=(("page-size",),))
        if spoil:
            spoiled = own[2:] if again_kl is None else own[1:]
            for record in own:
                write(folder, record, *([spoil] if record in spoiled else []))
        folder.seal()
        return judge_invariance(folder)

    return judge


@pytest.mark.parametrize(
    ("names", "place", "expected"),
    [
        (("q.7", "new_k.7", "new_v.7"), "layer 7, before attention, head", {"names": ("q", "k", "v"), "before": 3}),
        (("q.3", "new_k.3"), "layer 3, before attention, head", {"names": ("q", "k"), "before": None}),
        (("v.3", "layer.3"), "layer 3, KV cache, KV head", {"names": ("v",), "positions": 12, "position": 0}),
        (("layer.3", "q.7"), "layer 3, attention, head", {"place": "attention", "names": ("output",)}),
        (("after.3", "q.7"), "layer 3, after attention", {"place": "layer", "names": ("output",), "head": None}),
        ((), "after layer 7", {"place": "behind layers", "layer": 7, "layers": 2}),
    ],
)
def test_the_place_is_named(judged: Judge, names: tuple[str, ...], place: str, expected: dict[str, Any]) -> None:
    def spoil(kept: dict[str, torch.Tensor]) -> None:
        for name in names:
            kept[name] *= 1.5

    result = judged(spoil)
    (finding,), (parting,) = result.findings, result.partings
    assert finding.where.startswith(f"first at probe 0+8, generated token 1; {place}")
    assert parting.model_dump(include=set(expected)) == expected
    (inside,) = (each.values for each in finding.shown_by if each.id == "inside-the-model")
    assert (inside["layer"], inside["names"], inside["before"]) == (parting.layer, [*parting.names], parting.before)
    assert [arm.number for arm in result.arms] == [0, 1, 2], "what was asked again is no arm"


def test_a_pass_that_does_not_differ_again_is_not_observed(judged: Judge) -> None:
    (parting,) = judged(lambda kept: None, traced_kl=0.0).partings
    assert (parting.place, parting.not_observed) == ("", unobserved("same"))


@pytest.mark.parametrize(("again_kl", "place"), [(0.5, "cache"), (0.0, "behind layers")])
def test_a_base_that_differs_from_itself_in_another_batch_is_no_floor(judged: Judge, again_kl: float, place: str) -> None:
    (parting,) = judged(lambda kept: kept["v.3"].mul_(1.5), again_kl=again_kl).partings
    assert parting.place == place


def test_what_was_not_asked_again_is_not_observed(judged: Judge) -> None:
    result = judged()
    assert result.partings[0].not_observed == unobserved("not asked")
    assert result.partings[0].not_observed in result.findings[0].shown_by
    assert result.findings[0].where == "first at probe 0+8, generated token 1; in 3 of 3 probes"


def test_a_trace_that_was_refused_says_why(judged: Judge, tmp_path: Path) -> None:
    judged(lambda kept: None)
    folder = InvarianceFolder(tmp_path / "out")
    write_refusal(folder.server_folder(0), "005", "it cannot run TARGET_VERIFY batches")
    (parting,) = judge_invariance(folder).partings
    assert parting.not_observed is not None
    assert "TARGET_VERIFY" in parting.not_observed.values["said"]


def test_passes_that_verify_drafts_are_not_traced(judged: Judge) -> None:
    (parting,) = judged(lambda kept: None, verifications=3).partings
    assert parting.not_observed == unobserved("drafts")
