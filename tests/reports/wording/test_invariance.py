"""The words of features that must change nothing."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from assay.harness.evidence.invariance import ArmRecord, InvarianceFolder
from assay.harness.judge.invariance import judge_invariance
from assay.harness.judge.invariance_result import InvarianceResult
from assay.harness.statement import state
from assay.harness.verdict import CheckStatus, Requirement
from assay.reports.invariance import invariance_document
from assay.reports.page import to_html
from assay.reports.wording.requirements import said_check
from assay.reports.wording.say import said_finding, say
from assay.reports.wording.verdict import headline, reasons


@pytest.mark.parametrize(
    ("shown", "said"),
    [
        ({"why": "failed", "said": "the server died"}, "the server died"),
        ({"why": "failed", "said": ""}, "no probe was answered"),
        ({"why": "feature", "feature": "batch", "said": "resolved to 1"}, "batch was not shown to be on: resolved to 1"),
        ({"why": "feature", "feature": "batch", "said": ""}, "batch was not shown to be on: nothing says so"),
        ({"why": "base", "base": "exact"}, "its base, exact, was not run"),
        ({"why": "texts", "written": 0, "texts": 1}, "0 of 1 greedy texts were written"),
        ({"why": "probes", "answered": 1, "probes": 3}, "1 of 3 probes were answered"),
        ({"why": "scores", "probe": "2+8"}, "nothing of probe 2+8 was compared"),
        ({"why": "prompt", "probe": "2+8"}, "another part of the prompt of probe 2+8 was scored"),
        ({"why": "answer", "probe": "2+8"}, "the answer to probe 2+8 is not the one that was forced"),
        ({"why": "server"}, "what its server served was not observed"),
        ({"why": "parts"}, "no part of what its server served was observed of both"),
    ],
)
def test_an_arm_that_shows_nothing_says_why(shown: dict[str, Any], said: str) -> None:
    assert say(state("shows-nothing", **shown)) == said


@pytest.mark.parametrize(
    ("differs", "said"),
    [
        (
            {"by": "texts", "parted": 2, "texts": 8, "first": "greedy-003", "token": 5},
            "2 of 8 greedy texts part, the first, greedy-003, at token 5",
        ),
        (
            {"by": "ends of texts", "texts": 1, "first": "greedy-000", "before": ("length", 1), "now": ("stop", 9)},
            "1 greedy texts end otherwise, the first, greedy-000: stop after 9 tokens in place of length after 1 tokens",
        ),
        (
            {"by": "lengths", "answers": 1, "probe": "1+8", "before": 6, "now": 4},
            "1 answers have another length, the first, to probe 1+8, 4 tokens in place of 6",
        ),
        (
            {"by": "ends", "answers": 1, "probe": "2+8", "before": "length", "now": "abort"},
            "1 answers end otherwise, the first, to probe 2+8: abort in place of length",
        ),
        (
            {"by": "tokens", "answers": 1, "probe": "2+8", "token": 3},
            "1 answers part at no tie, the first, to probe 2+8, at token 3",
        ),
        (
            {"by": "drafts declared", "accepted": 1.0, "declared": 3.0},
            "1.00 tokens were accepted a pass, where a draft of the model itself gives 3",
        ),
        (
            {"by": "drafts", "passes": 120, "alone": 80, "arm": "draft"},
            "drafts were lost: the same tokens took 120 passes in place of 80 (draft)",
        ),
    ],
)
def test_an_arm_that_differs_in_what_it_wrote_says_how(differs: dict[str, Any], said: str) -> None:
    assert say(state("arm-differs", **differs)) == said


INSIDE = {"head": 3, "position": 0, "positions": 12, "error": 0.5, "bound": 1e-6, "layers": 2, "layer": 3, "before": None}
SIZE = "(a relative error of 0.5, most in head 3; up to 1e-06 is rounding)"


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (
            {"place": "input", "names": ("q", "k", "v"), "layer": 7, "before": 3},
            f"layer 7: q, K and V differ as they are computed {SIZE}, and the output of attention in layer 3 is the same",
        ),
        ({"place": "input", "names": ("q",)}, f"layer 3: q differs as they are computed {SIZE}"),
        (
            {"place": "input", "names": ("q", "k")},
            f"layer 3: q and K differ as they are computed {SIZE}: V is the same, so it is their positions, or RoPE",
        ),
        (
            {"place": "cache", "names": ("v",)},
            f"layer 3: V in the KV cache differs in 12 tokens, first in token 1 {SIZE.replace('head', 'KV head')}, and what this "
            "request computes is the same",
        ),
        (
            {"place": "attention", "names": ("output",)},
            f"layer 3: the output of attention differs {SIZE}, and q, K and V are the same",
        ),
        (
            {"place": "behind attention", "names": (), "head": None, "layer": 7},
            "behind the last layer's attention: in all 2 layers q, K, V and the output are the same",
        ),
    ],
)
def test_the_place_inside_the_model_is_named(found: dict[str, Any], said: str) -> None:
    assert say(state("inside-the-model", **INSIDE | found)) == f"inside the model: {said}"


@pytest.mark.parametrize(
    ("why", "said"),
    [
        ("texts", "no token of a probe differs, only what was written"),
        ("not asked", "it was not asked again with a trace"),
        ("drafts", "its passes verify drafts, and attention is not traced there"),
        ("same", "asked again with the trace on, it did not differ there"),
        ("said", "no pass was traced"),
    ],
)
def test_a_place_that_was_not_observed_says_why(why: str, said: str) -> None:
    text = say(state("inside-not-observed", why=why, said="no pass was traced"))
    assert text == f"inside the model: not observed: {said}"


MEANS = [("prefill", 1e-3), ("decode", 0.0)]


@pytest.mark.parametrize(
    ("requirement", "status", "id_", "values", "found", "settles"),
    [
        ("same-servers", "ok", "arms-served-alike", {"servers": 2, "parts": 3},
         "what 2 servers served agrees in 3 parts", ""),
        ("same-servers", "ok", "arms-served-alike", {"servers": 1, "parts": 0}, "every arm ran in the server of its base", ""),
        ("invariance-ended", "missing", "arms-recorded", {"arms": 4, "ended": False},
         "it ended early, after 4 arms", "run it again"),
        ("probes-answered", "missing", "probes-cut-short", {"probes": 3, "first": "0+8", "tokens": 6, "asked": 64},
         "3 were not, the first, 0+8, with 6 of 64 tokens", "see why in the log of its server"),
        ("base-agrees", "missing", "base-disagrees",
         {"means": MEANS, "worst": 0.5, "at": "probe 0+8", "changed": "in 1 of 3 probes", "decode": False},
         "prefill: mean KL 0.001 nats; decode: mean KL 0 nats; at worst 0.5 at probe 0+8; in 1 of 3 probes",
         "the same tokens are scored differently without any feature: see which probes, alone and in batches"),
        ("base-agrees", "missing", "base-disagrees", {"means": MEANS, "worst": 0.0, "at": "", "changed": "", "decode": True},
         "prefill: mean KL 0.001 nats; decode: mean KL 0 nats", "decode is not what prefill computes of the same tokens: assay "
         "backends --honours compares both with the truth"),
        ("probes-sensitive", "missing", "probes-not-under-fault", {"said": None}, "no fault was seeded", "run it again"),
        ("probes-sensitive", "missing", "probes-not-under-fault", {"said": ""}, "the probes were not answered", "run it again"),
        ("probes-sensitive", "missing", "probes-under-fault", {"means": MEANS},
         "prefill: mean KL 0.001 nats; decode: mean KL 0 nats", "use real weights (without --load-format=dummy)"),
        ("features-on", "missing", "features-not-on", {"features": [("a", "resolved to 1"), ("b", "")], "spent": False},
         "a: resolved to 1; b: in no arm", "see why the server switched them off, or leave them out with --features"),
        ("features-on", "missing", "features-not-on", {"features": [("b", "")], "spent": True},
         "b: in no arm", "give it more --minutes, or leave them out with --features"),
        ("arms-decided", "missing", "arms-not-recorded", {"arms": ["a + b"], "minutes": 1.0},
         "1 planned arm without a record: a + b", "give it more --minutes"),
        ("arms-decided", "missing", "arms-not-recorded", {"arms": [*"abcdefgh"], "minutes": 0.0},
         "8 planned arms without a record: a; b; c; d; e; f", "run it again"),
        ("arms-decided", "missing", "arms-undecided",
         {"arms": [("a", [state("shows-nothing", why="server"), state("arm-served-otherwise", differs=["x", "y"])])]},
         "a: what its server served was not observed; of what its server served (A its base's, B its own), x; y",
         "read the logs of their servers, or leave the features out with --features"),
        ("pairs-covered", "not checked", "pairs-covered", {"mode": "singles", "left_out": []},
         "features were not switched in pairs, but as --singles", "leave it out"),
        ("pairs-covered", "not checked", "pairs-covered", {"mode": "pairs", "left_out": ["a + b"]},
         "1 pair left out: a + b", "give it more --minutes"),
        ("pairs-covered", "ok", "pairs-covered", {"mode": "pairs", "left_out": []}, "all that can be on together", ""),
    ],
)  # fmt: skip
def test_a_requirement_says_what_was_found_and_what_would_resolve_it(
    requirement: str, status: CheckStatus, id_: str, values: dict[str, Any], found: str, settles: str
) -> None:
    said = said_check(Requirement(requirement).check(status, state(id_, **values)))
    assert (said.found, said.settles) == (found, settles)


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
    claim = result.findings[0].claim
    assert claim is not None
    written = claim.values | {"kl": None, "why": [state("arm-differs", by="tokens", answers=1, probe="2+8", token=3)]}
    said = "page-size: 1 answers part at no tie, the first, to probe 2+8, at token 3, where pages of 16 tokens, in 1 of 2 askings"
    assert say(state("feature-changes-output", **written)) == said
