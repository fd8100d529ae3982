"""The whole of ``assay invariance`` over a stand-in for servers, which has bugs to order."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from assay.evals.probes import probe_load
from assay.harness.config import RunSpec
from assay.harness.engines.inside.control import Control
from assay.harness.engines.sglang.features import features_of
from assay.harness.errors import EngineError, UsageError
from assay.harness.evidence.invariance import InvarianceFolder
from assay.harness.judge.invariance_arms import BASE, ArmJudge
from assay.harness.judge.invariance_result import InvarianceResult
from assay.harness.judge.probe_scores import bounds
from assay.harness.progress import ProgressDisplay
from assay.harness.run.invariance import drive, plan
from assay.harness.run.run import compare_features
from assay.harness.statement import state
from assay.reports.wording.verdict import headline

PROBES = ("0+3", "16+9", "33+14", "0+129", "120+16", "1024+12")
"""Those of the load that a stand-in is asked."""
Compare = Callable[..., InvarianceResult]


@pytest.fixture
def compared(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, featured_server: ModuleType) -> Compare:
    """Compares features of servers with a bug; what was started is in the result's `started`."""
    made, load = drive.make_engine, probe_load("cpu", 4096, 97)
    few = replace(load, probes=tuple(probe for probe in load.probes if probe.id in PROBES))
    monkeypatch.setattr(plan, "probe_load", lambda *args: few)

    def run(
        bug: Any = lambda served: False, refused: tuple[str, ...] = (), flags: tuple[str, ...] = (), **asked: Any
    ) -> InvarianceResult:
        kind = type("Server", (featured_server.FeaturedServer,), {"bug": staticmethod(bug), "refused": refused, "started": []})
        monkeypatch.setattr(drive, "make_engine", lambda *args, **kwargs: kind(made(*args, **kwargs).launch))
        spec = RunSpec.of(reference="torch_native", candidate="torch_native", engine_arg=flags)
        return compare_features(spec, tmp_path / "out", **asked)

    return run


def test_honest_servers_pass_with_every_feature_shown_to_be_on(compared: Compare) -> None:
    result = compared()
    assert result.verdict == "pass", headline(result)
    assert {id_ for arm in result.arms for id_ in arm.seen} == set(result.features)
    assert len(result.features) == 15
    assert result.not_covered.keys() >= {"cuda-graph-decode", "ngram", "hicache"}
    assert result.servers <= 12
    assert result.partings == ()


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("carriers", "bug"),
    [
        ({"prefix-cache", "page-size"}, lambda served: served.cached > 500 and "--page-size" in served.flags),
        ({"batch", "overlap"}, lambda served: served.batch > 2 and "--disable-overlap-schedule" not in served.flags),
        ({"weights-again"}, lambda served: served.reloaded),
        ({"streamed"}, lambda served: served.streamed),
        ({"no-radix-cache"}, lambda served: "--disable-radix-cache" in served.flags),
    ],
)
def test_a_bug_is_reduced_to_what_carries_it(compared: Compare, carriers: set[str], bug: Any) -> None:
    result = compared(bug)
    assert result.verdict == "regression"
    (finding,) = result.findings
    assert finding.title == f"{' + '.join(sorted(carriers))} changes the output"
    assert finding.reproduce.endswith(f"--features={','.join(sorted(carriers))} --together")
    if len(carriers) == 2:
        assert finding.claim is not None
        assert [kl for _, kl in finding.claim.values["alone"]] == [0.0, 0.0], "each alone changes nothing"
    assert "; layer 1, attention, head " in finding.where
    (parting,) = result.partings
    assert (set(parting.features), parting.place, parting.layer, parting.names) == (carriers, "attention", 1, ("output",))
    assert any(each.id == "inside-the-model" for each in finding.shown_by)


@pytest.mark.slow  # fast: test_two_bugs_are_both_found
def test_a_second_bug_that_only_arms_with_the_first_show_is_named_too(compared: Compare) -> None:
    def bug(served: Any) -> bool:
        first = served.batch > 2 and "--disable-overlap-schedule" not in served.flags
        return first or (served.cached > 500 and "--page-size" in served.flags)

    result = compared(bug, features=("batch", "overlap", "page-size", "prefix-cache"))
    assert {finding.title for finding in result.findings} == {
        "batch + overlap changes the output",
        "page-size + prefix-cache changes the output",
    }


def test_a_difference_that_does_not_come_again_has_no_place_in_the_model(compared: Compare) -> None:
    asked: list[str] = []

    def once(served: Any) -> bool:
        asked.append("streamed" if served.streamed else "")
        return served.streamed and asked.count("streamed") <= len(PROBES)

    result = compared(once, features=("streamed",))
    (parting,) = result.partings
    assert (parting.place, parting.not_observed) == ("", state("inside-not-observed", why="same", said=""))
    assert parting.not_observed in result.findings[0].shown_by


@pytest.mark.parametrize("together", [False, True])
def test_what_does_not_differ_each_time_is_not_reduced(compared: Compare, together: bool) -> None:
    hits: list[Any] = []

    def first(served: Any) -> bool:
        if served.cached > 500 and "--page-size" in served.flags:
            hits.append(served)
        return len(hits) == 1 and served is hits[0]

    result = compared(first, features=("page-size", "prefix-cache", "streamed"), together=together)
    assert result.verdict == "regression"
    (finding,) = result.findings
    assert finding.title.endswith("changes the output in 1 of 2 askings")
    assert finding.claim is not None
    assert finding.claim.values["askings"] == [1, 2]
    assert state("seen-besides", what="unsteady", names=[]) in finding.shown_by
    chosen = [arm.chosen_by for arm in result.arms]
    assert (chosen.count("asked again"), chosen.count("reduction")) == (1, 0)
    assert state("inside-not-observed", why="not asked", said="") in finding.shown_by


def test_a_server_that_writes_no_trace_is_not_observed(
    compared: Compare, featured_server: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(featured_server.FeaturedServer, "_trace", lambda *args: None)
    result = compared(lambda served: served.streamed, features=("streamed",))
    (parting,) = result.partings
    assert parting.not_observed is not None
    assert "the server traced no pass" in parting.not_observed.values["said"]
    assert "layer" not in result.findings[0].where


def test_a_set_on_together_compares_each_alone_where_the_set_differs(compared: Compare) -> None:
    def bug(served: Any) -> bool:
        return served.cached > 500 and "--page-size" in served.flags

    result = compared(bug, features=("page-size", "prefix-cache", "streamed"), together=True)
    assert [arm.features for arm in result.arms[2:]] == [
        ("page-size", "prefix-cache", "streamed"), ("page-size", "prefix-cache", "streamed"), ("page-size",), ("prefix-cache",),
        ("streamed",),
    ]  # fmt: skip
    assert result.arms[3].chosen_by == "asked again"
    (finding,) = result.findings
    assert finding.title == "page-size + prefix-cache + streamed changes the output", "what was asked for is not reduced"
    assert finding.claim is not None
    assert finding.claim.values["alone"] == [["page-size", 0.0], ["prefix-cache", 0.0], ["streamed", 0.0]]


def test_a_server_that_does_not_start_is_no_pass_and_does_not_end_the_others(compared: Compare) -> None:
    result = compared(refused=("--page-size",), features=("page-size", "batch"))
    assert result.verdict == "inconclusive"
    assert {arm.verdict for arm in result.arms if "page-size" in arm.features} == {"inconclusive"}
    assert {arm.verdict for arm in result.arms if "page-size" not in arm.features} == {"pass"}
    assert "the stand-in does not start" in headline(result)


def test_a_base_that_does_not_start_is_an_error(compared: Compare) -> None:
    with pytest.raises(EngineError, match="The base could not be run"):
        compared(refused=("--disable-overlap-schedule",))


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({"features": ("chunks",)}, "chunks is not a feature"),
        ({"features": ("ngram",)}, "ngram cannot be switched here: not on cpu"),
        ({"features": ("no-radix-cache", "prefix-cache"), "together": True}, "cannot be on together"),
        ({"together": True}, "cannot be on together"),
    ],
)
def test_wrong_use(compared: Compare, asked: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        compared(**asked)


def test_what_the_base_has_too_was_not_switched(
    compared: Compare, featured_server: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = featured_server.FeaturedServer
    monkeypatch.setattr(server, "arguments", lambda self, own=server.arguments: own(self) | {"page_size": 16})
    result = compared(features=("page-size", "batch"))
    assert result.verdict == "inconclusive"
    assert "page-size: the base has it too: page_size = 16; remove the engine's own flag that sets it" in headline(result)
    assert {id_ for arm in result.arms for id_ in arm.seen} == {"batch"}


def test_a_feature_that_the_engines_own_flags_decide_is_refused_or_left_out(compared: Compare) -> None:
    flags = ("--chunked-prefill-size=64", "--page-size=16")
    with pytest.raises(UsageError, match="page-size cannot be switched here: the base has it too: --page-size=16"):
        compared(features=("batch", "page-size"), flags=flags)
    result = compared(flags=flags)
    why = result.not_covered
    assert why["page-size"] == "the base has it too: --page-size=16"
    assert why["chunked-prefill"] == "--chunked-prefill-size=64 overrides the flag that switches it"
    assert why["mixed-chunk"] == f"it needs chunked-prefill: {why['chunked-prefill']}"
    assert "batch" in result.features


def test_a_fault_that_is_not_seen_is_no_pass(compared: Compare, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drive, "Control", lambda **fields: Control())
    result = compared(features=("prefix-cache", "batch"))
    assert result.verdict == "inconclusive"
    assert next(check for check in result.checks if check.id == "probes-sensitive").status == "missing"


@pytest.mark.parametrize("flags", [(), ("--disable-radix-cache",)])
def test_a_fault_is_seeded_whatever_is_switched(compared: Compare, flags: tuple[str, ...]) -> None:
    result = compared(features=("batch", "page-size"), flags=flags)
    assert result.verdict == "pass", headline(result)
    assert next(check for check in result.checks if check.id == "probes-sensitive").status == "ok"


def test_a_fault_behind_prefixes_that_no_server_caches_shows_nothing(
    compared: Compare, featured_server: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(featured_server.FeaturedServer, "_cached", lambda *args: 0)
    result = compared(features=("batch", "page-size"))
    assert result.verdict == "inconclusive"
    check = next(check for check in result.checks if check.id == "probes-sensitive")
    said = "no prefix came from the cache, and the fault needs a cached prefix"
    assert (check.status, check.outcome.values) == ("missing", {"said": said})


def test_drafts_are_compared_with_those_of_the_same_speculation_alone(tmp_path: Path, arm_records: ModuleType) -> None:
    known = {id_: features_of("cuda")[id_] for id_ in ("eagle", "page-size")}
    both, eagle = frozenset(known), frozenset({"eagle"})
    assert eagle in plan._with_bases([both], known), "it is run where only larger arms were chosen"
    reference = SimpleNamespace(flags=())
    planned = SimpleNamespace(known=known, dtype="bfloat16", run=SimpleNamespace(spec=SimpleNamespace(reference=reference)))
    session = drive.InvarianceSession(planned, InvarianceFolder.new(tmp_path / "out"), ProgressDisplay(Console(quiet=True), 30.0))  # type: ignore[arg-type]
    alone, lost = arm_records.drafting("eagle", passes=2), arm_records.drafting("eagle", "page-size", passes=3)
    base = arm_records.BASE.model_copy(update={"replies": alone.replies})
    session.records |= {BASE: base, eagle: alone, both: lost}
    judge = ArmJudge(session.records, bounds(base, [base], "bfloat16"), known, "bfloat16")
    assert session._states(judge) == {eagle: False, both: True}
