"""The words of features that must change nothing."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from assay.harness.evidence.invariance import ArmRecord, InvarianceFolder
from assay.harness.judge.invariance import judge_invariance
from assay.harness.judge.invariance_result import InvarianceResult
from assay.reports.invariance import invariance_document
from assay.reports.page import to_html
from assay.reports.wording.say import said_finding
from assay.reports.wording.verdict import headline, reasons


def judged(tmp_path: Path, arm_records: ModuleType, records: Sequence[ArmRecord], **made: Any) -> InvarianceResult:
    folder = InvarianceFolder.new(tmp_path / "out")
    arm_records.write(folder, records, **made)
    result = judge_invariance(folder)
    assert InvarianceResult.model_validate_json(result.model_dump_json()) == result
    return result


def test_a_pass_says_how_much_was_switched(tmp_path: Path, arm_records: ModuleType) -> None:
    planned = (("prefix-cache",), ("page-size",), ("page-size", "prefix-cache"))
    arms = [arm_records.arm("prefix-cache"), arm_records.arm("page-size", number=3)]
    result = judged(tmp_path, arm_records, arms, arms=planned, minutes=1.0)
    assert headline(result) == "2 features in 2 arms changed nothing in torch_native; 1 pair left out."
    assert reasons(result) == []
    assert "not covered: in no arm that was run to its end" in to_html(invariance_document(result))


def test_without_a_verdict_the_first_requirement_that_is_not_met_is_the_headline(tmp_path: Path, arm_records: ModuleType) -> None:
    result = judged(tmp_path, arm_records, [arm_records.arm("prefix-cache")], ended=False)
    said = "not every arm was recorded: it ended early, after 4 arms."
    assert headline(result) == said
    assert reasons(result) == [f"{said} To resolve: run it again."]


def test_features_that_change_the_output_are_named_with_what_each_does_alone(tmp_path: Path, arm_records: ModuleType) -> None:
    both, arm = ("page-size", "prefix-cache"), arm_records.arm
    arms = [
        arm("page-size"), arm(*both, number=3, decode=0.8), arm(*both, "order", number=4, decode=0.8),
        arm("batch", number=5, decode=0.8),
    ]  # fmt: skip
    reference = {"model": "tiny", "flags": (), "environment": {"KEY": "secret"}, "interpreter": "/other/python"}
    result = judged(tmp_path, arm_records, arms, spec={"device": "cpu", "reference": reference})
    batch, pair = map(said_finding, result.findings)
    assert headline(result) == f"{batch.diagnosis}, and 1 further set of features."
    assert reasons(result) == [batch.sentence, pair.sentence]
    assert pair.diagnosis == (
        "page-size + prefix-cache: mean KL 0.27 nats where pages of 16 tokens and the prefix of a prompt comes from the cache; "
        "each alone: page-size: 0; prefix-cache: not run"
    )
    assert pair.evidence == (
        "prefill: mean KL 0 nats over 21 positions, at worst 0",
        "decode: mean KL 0.268 nats over 18 positions, at worst 0.268",
        "probes that differ: 0+8, 1+8, 2+8",
        "each alone: page-size: 0; prefix-cache: not run",
        "inside the model: not observed: it was not asked again with a trace",
        "not in the command, which has no flag for it: KEY and interpreter /other/python",
        "also in order + page-size + prefix-cache",
    )


def test_what_does_not_differ_each_time_is_said_so(tmp_path: Path, arm_records: ModuleType) -> None:
    arms = [arm_records.arm("page-size", decode=0.8), arm_records.arm("page-size", number=3, why="asked again")]
    result = judged(tmp_path, arm_records, arms, arms=(("page-size",),))
    assert headline(result).endswith(" where pages of 16 tokens, in 1 of 2 askings.")
    assert "not reduced, since it does not differ each time" in said_finding(result.findings[0]).evidence
