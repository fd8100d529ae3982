from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from rich.console import Console

from assay.harness.errors import EvidenceError, ExitCode
from assay.harness.evidence.invariance import ArmRecord, InvarianceFolder
from assay.harness.judge.invariance import judge_invariance
from assay.harness.judge.invariance_result import InvarianceResult
from assay.reports.invariance import invariance_document
from assay.reports.junit import to_junit
from assay.reports.markdown import to_markdown
from assay.reports.page import to_html
from assay.reports.terminal import render

Judge = Callable[..., InvarianceResult]


@pytest.fixture
def judged(tmp_path: Path, arm_records: ModuleType) -> Judge:
    def judge(records: Sequence[ArmRecord], again: ArmRecord | None = None, **manifest: Any) -> InvarianceResult:
        folder = InvarianceFolder.new(tmp_path / f"out-{len(list(tmp_path.iterdir()))}")
        arm_records.write(folder, records, again, **manifest)
        return judge_invariance(folder)

    return judge


def test_features_that_change_nothing_pass(judged: Judge, arm_records: ModuleType) -> None:
    result = judged([arm_records.arm("prefix-cache"), arm_records.arm("prefix-cache", "page-size", number=3)])
    assert (result.verdict, result.exit_code) == ("pass", ExitCode.PASS)
    assert result.headline == "2 features in 2 arms changed nothing in torch_native."
    assert [arm.verdict for arm in result.arms] == ["pass"] * 4
    assert {check.id: check.status for check in result.checks} == {
        "invariance-ended": "ok",
        "probes-answered": "ok",
        "base-agrees": "ok",
        "probes-sensitive": "ok",
        "features-on": "ok",
        "same-servers": "ok",
        "arms-decided": "ok",
        "pairs-covered": "ok",
    }


def test_a_pair_that_breaks_is_named_with_what_each_does_alone(judged: Judge, arm_records: ModuleType) -> None:
    arm = arm_records.arm
    arms = [
        arm("prefix-cache"),
        arm("page-size", number=3),
        arm("prefix-cache", "page-size", number=4, decode=0.8),
        arm("prefix-cache", "page-size", "order", number=5, decode=0.8),
    ]
    result = judged(arms)
    assert (result.verdict, result.exit_code) == ("regression", ExitCode.REGRESSION)
    (finding,) = result.findings
    assert finding.title == "page-size + prefix-cache changes the output"
    assert finding.where == "first at probe 0+8, generated token 1; in 3 of 3 probes"
    assert "probes that differ: 0+8, 1+8, 2+8" in finding.evidence
    assert "page-size: 0; prefix-cache: 0" in finding.diagnosis
    assert finding.reproduce == "assay invariance --features=page-size,prefix-cache --arms=exactly"
    assert "also in order + page-size + prefix-cache" in finding.evidence
    pairs = {(pair.first, pair.other): pair.verdict for pair in result.pairs}
    assert pairs["prefix-cache", "page-size"] == "regression"
    assert pairs["prefix-cache", "prefix-cache"] == "pass", "it is on in an arm that is the same"


@pytest.mark.parametrize(("again", "askings"), [(0.3, ""), (0.0, " in 1 of 2 askings")])
def test_an_arm_that_was_asked_again_is_described_by_its_first_failure(
    judged: Judge, arm_records: ModuleType, again: float, askings: str
) -> None:
    both = ("page-size", "prefix-cache")
    arms = [arm_records.arm(*both, decode=0.8), arm_records.arm(*both, number=3, why="asked again", decode=again)]
    result = judged(arms, arms=(both,))
    (finding,) = result.findings
    assert finding.title == f"page-size + prefix-cache changes the output{askings}"
    assert f"mean KL {result.arms[2].decode_kl:.2g} nats" in finding.diagnosis
    assert ("each alone: page-size: not run; prefix-cache: not run" in finding.diagnosis) == (not askings)
    assert result.verdict == "regression"


def test_a_feature_that_was_not_shown_to_be_on_is_no_pass(judged: Judge, arm_records: ModuleType) -> None:
    unseen = arm_records.arm("page-size", number=3).model_copy(update={"seen": {}, "unseen": {"page-size": "resolved to 1"}})
    result = judged([arm_records.arm("prefix-cache"), unseen])
    assert (result.verdict, result.exit_code) == ("inconclusive", ExitCode.NO_VERDICT)
    assert "page-size: resolved to 1" in result.headline


def test_what_the_command_of_a_finding_cannot_repeat_is_named(judged: Judge, arm_records: ModuleType) -> None:
    reference = {"model": "tiny", "flags": (), "environment": {"KEY": "secret"}, "interpreter": "/other/python"}
    result = judged([arm_records.arm("prefix-cache", decode=0.8)], spec={"device": "cpu", "reference": reference})
    evidence = result.findings[0].evidence
    assert "not in the command, which has no flag for it: KEY and interpreter /other/python" in evidence
    assert "secret" not in " ".join(evidence)


def in_two_servers(arm_records: ModuleType, served: Any, decode: float = 0.0) -> dict[str, Any]:
    """An arm in a second server, which served so."""
    record = arm_records.arm("page-size", decode=decode).model_copy(update={"server": 1})
    return {"records": [record], "served": {1: served}}


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"packages": {"torch": "3"}}, "torch is 2 in A, 3 in B"),
        ({"arguments": {"page_size": "1", "dtype": "float16"}}, "dtype is absent in A, float16 in B"),
    ],
)
def test_an_arm_whose_server_served_something_else_is_no_pass(
    judged: Judge, arm_records: ModuleType, changed: dict[str, Any], says: str
) -> None:
    served = arm_records.SERVED.model_copy(update=changed)
    result = judged(**in_two_servers(arm_records, served))
    assert (result.verdict, result.exit_code) == ("inconclusive", ExitCode.NO_VERDICT)
    why = f"of what its server served (A its base's, B its own), {says}"
    assert result.headline.startswith("it is not shown that the servers differed in the treatment alone")
    assert (result.arms[-1].verdict, result.arms[-1].why) == ("inconclusive", why)
    both = judged(**in_two_servers(arm_records, served, decode=0.8))
    assert both.verdict == "regression"
    assert why in both.findings[0].evidence, "it may be why the output changes"


def test_what_features_declare_may_differ(judged: Judge, arm_records: ModuleType) -> None:
    changed = {"arguments": {"page_size": "16", "cuda_graph_config": "other sizes"}}
    assert judged(**in_two_servers(arm_records, arm_records.SERVED.model_copy(update=changed))).verdict == "pass"
    flags = {"asked": {"--lora-backend": "triton"}, "arguments": {"page_size": "1", "lora_backend": "triton"}}
    assert judged(**in_two_servers(arm_records, arm_records.SERVED.model_copy(update=flags))).verdict == "pass"


def test_an_arm_whose_server_did_not_start_is_no_pass(judged: Judge, arm_records: ModuleType) -> None:
    both = arm_records.arm("prefix-cache", "page-size", number=4, problem="the server failed during start-up")
    result = judged([arm_records.arm("prefix-cache"), arm_records.arm("page-size", number=3), both])
    assert result.verdict == "inconclusive"
    assert "the server failed during start-up" in result.headline


def test_no_arm_is_no_pass(judged: Judge) -> None:
    assert judged([]).verdict == "inconclusive"


@pytest.mark.parametrize(
    "seen", [(0.0, 0.0), (1.0, 0.0), (0.0, 1.0), None], ids=["not at all", "in prefill alone", "in decode alone", "not seeded"]
)
def test_a_fault_that_the_probes_do_not_see_is_no_pass(judged: Judge, arm_records: ModuleType, seen: tuple[float, float]) -> None:
    arms = [arm_records.arm("prefix-cache"), arm_records.arm("page-size", number=3)]
    result = judged(arms, fault_seen=seen)
    assert result.verdict == "inconclusive"
    assert {check.id: check.status for check in result.checks}["probes-sensitive"] == "missing"


def test_a_base_that_differs_from_itself_says_nothing_about_features(judged: Judge, arm_records: ModuleType) -> None:
    arms = [arm_records.arm("prefix-cache"), arm_records.arm("page-size", number=3)]
    result = judged(arms, arm_records.arm(number=1, why="base again", decode=0.5))
    assert (result.verdict, result.exit_code, result.findings) == ("inconclusive", ExitCode.NO_VERDICT, ())
    assert result.headline.startswith("the base does not agree with itself in other batches: ")
    assert [arm.verdict for arm in result.arms] == ["pass", "inconclusive", "pass", "pass"]
    wrong = judged(
        [arms[0], arm_records.arm("page-size", number=3, decode=0.8)], arm_records.arm(number=1, why="base again", decode=0.5)
    )
    assert (wrong.verdict, [finding.title for finding in wrong.findings]) == ("regression", ["page-size changes the output"])


def test_what_longer_prompts_round_otherwise_is_allowed_in_half_precision(judged: Judge, arm_records: ModuleType) -> None:
    shift = 5e-3
    arms = [
        arm_records.arm(number=2, why="base longer", prefill=shift, decode=shift),
        arm_records.arm("prefix-cache", number=3, prefill=shift, decode=shift),
        arm_records.arm("page-size", "prefix-cache", number=4),
    ]
    planned = (("prefix-cache",), ("page-size", "prefix-cache"))
    result = judged(arms, dtype="bfloat16", arms=planned)
    assert result.verdict == "pass"
    assert [arm.chosen_by for arm in result.arms][:3] == ["base", "base again", "base longer"]
    wrong = arm_records.arm("prefix-cache", number=3, prefill=10 * shift, decode=shift)
    assert judged([arms[0], wrong, arms[2]], dtype="bfloat16", arms=planned).verdict == "regression"


def test_pairs_that_the_budget_left_out_are_named_and_forbid_no_pass(judged: Judge, arm_records: ModuleType) -> None:
    planned = (("prefix-cache",), ("page-size",), ("page-size", "prefix-cache"))
    result = judged([arm_records.arm("prefix-cache"), arm_records.arm("page-size", number=3)], arms=planned, minutes=1.0)
    assert result.verdict == "pass"
    assert result.left_out == (("page-size", "prefix-cache"),)
    check = next(check for check in result.checks if check.id == "pairs-covered")
    assert (check.status, check.settles) == ("not checked", "give it more --minutes")
    assert "page-size + prefix-cache" in check.found
    assert result.headline == "2 features in 2 arms changed nothing in torch_native; 1 pair left out."
    assert "In no arm that decided: page-size + prefix-cache." in to_html(invariance_document(result))


@pytest.mark.parametrize(("mode", "minutes"), [("exactly", 1.0), ("singles", 1.0), ("exactly", 0.0), ("pairs", 0.0)])
def test_a_planned_arm_without_a_record_is_no_pass(judged: Judge, arm_records: ModuleType, mode: str, minutes: float) -> None:
    planned = (("prefix-cache",), ("page-size",), ("page-size", "prefix-cache"))
    arms = [arm_records.arm("prefix-cache"), arm_records.arm("page-size", number=3)]
    result = judged(arms, arms=planned, mode=mode, minutes=minutes)
    assert (result.verdict, result.exit_code) == ("inconclusive", ExitCode.NO_VERDICT)
    assert "1 planned arm without a record: page-size + prefix-cache" in result.headline
    check = next(check for check in result.checks if check.id == "arms-decided")
    assert check.settles == ("give it more --minutes" if minutes else "run it again")


def test_a_base_that_stopped_early_is_no_pass(judged: Judge, arm_records: ModuleType) -> None:
    lengths = {f"{n}+8": (arm_records.PROMPT, arm_records.SHARED, 64) for n in range(3)}
    result = judged([arm_records.arm("prefix-cache")], lengths=lengths)
    assert result.verdict == "inconclusive"
    assert "3 were not, the first, 0+8, with 6 of 64 tokens" in result.headline
    more = {f"{n}+8": (arm_records.PROMPT, arm_records.SHARED, arm_records.DEPTH) for n in range(4)}
    assert "3+8, with 0 of 6 tokens" in judged([arm_records.arm("prefix-cache")], lengths=more).headline


def test_a_folder_that_ended_early_is_no_pass(judged: Judge, arm_records: ModuleType, tmp_path: Path) -> None:
    assert judged([arm_records.arm("prefix-cache")]).verdict == "pass"
    (tmp_path / "out-0" / "end.json").unlink()
    result = judge_invariance(InvarianceFolder(tmp_path / "out-0"))
    assert result.verdict == "inconclusive"
    assert "ended early, after 4 arms" in result.headline


def test_a_folder_without_a_base_is_refused(tmp_path: Path, arm_records: ModuleType) -> None:
    folder = InvarianceFolder.new(tmp_path / f"out-{len(list(tmp_path.iterdir()))}")
    arm_records.write(folder, [], base=False)
    with pytest.raises(EvidenceError, match="no base"):
        judge_invariance(folder)


def test_the_result_is_shown_in_every_medium(judged: Judge, arm_records: ModuleType) -> None:
    arms = [arm_records.arm("prefix-cache"), arm_records.arm("page-size", number=3, decode=0.5)]
    document = invariance_document(judged(arms))
    console = Console(record=True, width=200, quiet=False, file=io.StringIO())
    render(document, console)
    for shown in (console.export_text(), to_html(document), to_markdown(document), to_junit(document)):
        assert "page-size" in shown
        assert "prefix-cache" in shown
    assert InvarianceResult.model_validate_json(document.json(document.result)) == document.result
