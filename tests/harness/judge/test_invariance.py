from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from assay.harness.errors import EvidenceError, ExitCode
from assay.harness.evidence.invariance import InvarianceFolder
from assay.harness.evidence.probes import ProbePass
from assay.harness.judge.invariance import judge_invariance
from assay.harness.judge.invariance_result import InvarianceResult
from assay.harness.statement import Statement, state
from assay.harness.verdict import Check, Finding

Judge = Callable[..., InvarianceResult]


def check_of(result: InvarianceResult, id_: str) -> Check:
    return next(check for check in result.checks if check.id == id_)


def decisive(result: InvarianceResult) -> tuple[str, str]:
    """The requirement and the outcome that the headline states."""
    assert result.decided.id == "requirement-unmet"
    return result.decided.values["requirement"], result.decided.values["outcome"].id


def shown_by(finding: Finding, id_: str, **values: Any) -> Statement | None:
    """The first statement of this id, with these values, by which a finding is shown."""
    return next((each for each in finding.shown_by if each.id == id_ and values.items() <= each.values.items()), None)


@pytest.fixture
def judged(tmp_path: Path, arm_records: ModuleType) -> Judge:
    def judge(records: Sequence[ProbePass], again: ProbePass | None = None, **manifest: Any) -> InvarianceResult:
        folder = InvarianceFolder.new(tmp_path / f"out-{len(list(tmp_path.iterdir()))}")
        arm_records.write(folder, records, again, **manifest)
        return judge_invariance(folder)

    return judge


def test_features_that_change_nothing_pass(judged: Judge, arm_records: ModuleType) -> None:
    result = judged([arm_records.arm("prefix-cache"), arm_records.arm("prefix-cache", "page-size", number=3)])
    assert (result.verdict, result.exit_code) == ("pass", ExitCode.PASS)
    assert result.decided.id == "features-change-nothing"
    assert result.decided.values == {"backend": "torch_native", "features": 2, "arms": 2}
    assert [arm.verdict for arm in result.arms] == ["pass"] * 4
    assert {check.id: check.status for check in result.checks} == {
        "invariance-ended": "ok",
        "probes-answered": "ok",
        "base-agrees": "ok",
        "probes-sensitive": "ok",
        "features-on": "ok",
        "same-servers": "ok",
        "arms-decided": "ok",
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
    assert shown_by(finding, "seen-besides", what="probes", names=["0+8", "1+8", "2+8"])
    assert finding.claim is not None
    assert result.decided.values == {"first": finding.claim, "further": 0}
    assert finding.claim.values["arm"] == "page-size + prefix-cache"
    assert finding.claim.values["alone"] == [["page-size", 0.0], ["prefix-cache", 0.0]]
    assert finding.reproduce == "assay invariance --features=page-size,prefix-cache --together"


@pytest.mark.parametrize(("again", "askings"), [(0.3, ""), (0.0, " in 1 of 2 askings")])
def test_an_arm_that_was_asked_again_is_described_by_its_first_failure(
    judged: Judge, arm_records: ModuleType, again: float, askings: str
) -> None:
    both = ("page-size", "prefix-cache")
    arms = [arm_records.arm(*both, decode=0.8), arm_records.arm(*both, number=3, why="asked again", decode=again)]
    result = judged(arms, arms=(both,))
    (finding,) = result.findings
    assert finding.title == f"page-size + prefix-cache changes the output{askings}"
    assert finding.claim is not None
    assert finding.claim.values["kl"] == result.arms[2].decode_kl
    assert finding.claim.values["askings"] == ([1, 2] if askings else None)
    unrun = [["page-size", "not run"], ["prefix-cache", "not run"]]
    assert finding.claim.values["alone"] == ([] if askings else unrun)
    assert bool(shown_by(finding, "seen-besides", what="unsteady")) == bool(askings)
    assert result.verdict == "regression"


def test_a_feature_that_was_not_shown_to_be_on_is_no_pass(judged: Judge, arm_records: ModuleType) -> None:
    unseen = arm_records.arm("page-size", number=3).model_copy(update={"seen": {}, "unseen": {"page-size": "resolved to 1"}})
    result = judged([arm_records.arm("prefix-cache"), unseen])
    assert (result.verdict, result.exit_code) == ("inconclusive", ExitCode.NO_VERDICT)
    assert decisive(result) == ("features-on", "features-not-on")
    values = check_of(result, "features-on").outcome.values
    assert values == {"features": [["page-size", "resolved to 1"]]}


def test_what_the_command_of_a_finding_cannot_repeat_is_named(judged: Judge, arm_records: ModuleType) -> None:
    reference = {"model": "tiny", "flags": (), "environment": {"KEY": "secret"}, "interpreter": "/other/python"}
    result = judged([arm_records.arm("prefix-cache", decode=0.8)], spec={"device": "cpu", "reference": reference})
    beyond = {"environment": ["KEY"], "interpreter": "/other/python"}
    assert shown_by(result.findings[0], "not-in-command", **beyond)
    assert "secret" not in result.findings[0].model_dump_json()


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
    why = state("arm-served-otherwise", differs=[says])
    assert decisive(result) == ("same-servers", "arms-served-otherwise")
    assert check_of(result, "same-servers").outcome.values == {"first": why, "arms": 1}
    assert (result.arms[-1].verdict, result.arms[-1].why) == ("inconclusive", (why,))
    both = judged(**in_two_servers(arm_records, served, decode=0.8))
    assert both.verdict == "regression"
    assert why in both.findings[0].shown_by, "it may be why the output changes"


def test_what_features_declare_may_differ(judged: Judge, arm_records: ModuleType) -> None:
    changed = {"arguments": {"page_size": "16", "cuda_graph_config": "other sizes"}}
    assert judged(**in_two_servers(arm_records, arm_records.SERVED.model_copy(update=changed))).verdict == "pass"
    flags = {"asked": {"--lora-backend": "triton"}, "arguments": {"page_size": "1", "lora_backend": "triton"}}
    assert judged(**in_two_servers(arm_records, arm_records.SERVED.model_copy(update=flags))).verdict == "pass"


def test_an_arm_whose_server_did_not_start_is_no_pass(judged: Judge, arm_records: ModuleType) -> None:
    both = arm_records.arm("prefix-cache", "page-size", number=4, problem="the server failed during start-up")
    result = judged([arm_records.arm("prefix-cache"), arm_records.arm("page-size", number=3), both])
    assert result.verdict == "inconclusive"
    assert decisive(result) == ("arms-decided", "arms-undecided")
    why = state("shows-nothing", why="failed", said="the server failed during start-up")
    assert check_of(result, "arms-decided").outcome.values["arms"] == [["page-size + prefix-cache", [why]]]


def test_no_arm_is_no_pass(judged: Judge) -> None:
    assert judged([]).verdict == "inconclusive"


@pytest.mark.parametrize(
    "seen", [(0.0, 0.0), (1.0, 0.0), (0.0, 1.0), None], ids=["not at all", "in prefill alone", "in decode alone", "not seeded"]
)
def test_a_fault_that_the_probes_do_not_see_is_no_pass(judged: Judge, arm_records: ModuleType, seen: tuple[float, float]) -> None:
    arms = [arm_records.arm("prefix-cache"), arm_records.arm("page-size", number=3)]
    result = judged(arms, fault_seen=seen)
    assert result.verdict == "inconclusive"
    check = check_of(result, "probes-sensitive")
    asked = seen is not None
    assert (check.status, check.outcome.id) == ("missing", "probes-under-fault" if asked else "probes-not-under-fault")


def test_a_base_that_differs_from_itself_says_nothing_about_features(judged: Judge, arm_records: ModuleType) -> None:
    arms = [arm_records.arm("prefix-cache"), arm_records.arm("page-size", number=3)]
    result = judged(arms, arm_records.arm(number=1, why="base again", decode=0.5))
    assert (result.verdict, result.exit_code, result.findings) == ("inconclusive", ExitCode.NO_VERDICT, ())
    assert decisive(result) == ("base-agrees", "base-disagrees")
    values = check_of(result, "base-agrees").outcome.values
    assert (values["at"], values["changed"]) == ("probe 0+8, generated token 1", "in 3 of 3 probes")
    assert not values["decode"], "it differs in other batches, not in longer prompts"
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
        arm_records.arm(number=5, why="base third"),
    ]
    planned = (("prefix-cache",), ("page-size", "prefix-cache"))
    result = judged(arms, dtype="bfloat16", arms=planned)
    assert result.verdict == "pass"
    assert [arm.chosen_by for arm in result.arms][:4] == ["base", "base again", "base longer", "base third"]
    wrong = arm_records.arm("prefix-cache", number=3, prefill=10 * shift, decode=shift)
    assert judged([arms[0], wrong, *arms[2:]], dtype="bfloat16", arms=planned).verdict == "regression"


def test_a_planned_arm_without_a_record_is_no_pass(judged: Judge, arm_records: ModuleType) -> None:
    planned = (("prefix-cache",), ("page-size",), ("page-size", "prefix-cache"))
    arms = [arm_records.arm("prefix-cache"), arm_records.arm("page-size", number=3)]
    result = judged(arms, arms=planned)
    assert (result.verdict, result.exit_code) == ("inconclusive", ExitCode.NO_VERDICT)
    assert decisive(result) == ("arms-decided", "arms-not-recorded")
    assert check_of(result, "arms-decided").outcome.values == {"arms": ["page-size + prefix-cache"]}


def test_a_base_that_stopped_early_is_no_pass(judged: Judge, arm_records: ModuleType) -> None:
    lengths = {f"{n}+8": (arm_records.PROMPT, arm_records.SHARED, 64) for n in range(3)}
    result = judged([arm_records.arm("prefix-cache")], lengths=lengths)
    assert result.verdict == "inconclusive"
    assert decisive(result) == ("probes-answered", "probes-cut-short")
    expected = {"probes": 3, "first": "0+8", "tokens": 6, "asked": 64}
    assert check_of(result, "probes-answered").outcome.values == expected
    more = {f"{n}+8": (arm_records.PROMPT, arm_records.SHARED, arm_records.DEPTH) for n in range(4)}
    longer = check_of(judged([arm_records.arm("prefix-cache")], lengths=more), "probes-answered")
    assert longer.outcome.values == {"probes": 1, "first": "3+8", "tokens": 0, "asked": 6}


def test_a_folder_that_ended_early_is_no_pass(judged: Judge, arm_records: ModuleType, tmp_path: Path) -> None:
    assert judged([arm_records.arm("prefix-cache")]).verdict == "pass"
    (tmp_path / "out-0" / "end.json").unlink()
    result = judge_invariance(InvarianceFolder(tmp_path / "out-0"))
    assert result.verdict == "inconclusive"
    assert decisive(result) == ("invariance-ended", "arms-recorded")
    assert check_of(result, "invariance-ended").outcome.values == {"arms": 4, "ended": False}


def test_a_folder_without_a_base_is_refused(tmp_path: Path, arm_records: ModuleType) -> None:
    folder = InvarianceFolder.new(tmp_path / f"out-{len(list(tmp_path.iterdir()))}")
    arm_records.write(folder, [], base=False)
    with pytest.raises(EvidenceError, match="no base"):
        judge_invariance(folder)
