"""The probes of a run of two sides: what decides, where the servers part, and what forbids a pass."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from assay.harness.evidence.folder import RunFolder
from assay.harness.evidence.probes import CONDITIONS, ProbePass, TracedPlace, record_pass
from assay.harness.evidence.trace import TraceHeader, write_pass
from assay.harness.judge.build import build
from assay.harness.judge.report import Report
from assay.harness.judge.side_probes import farthest, judge_probes, limits_of
from assay.harness.policy import Policy
from assay.harness.sides import ROLES, Role
from assay.reports.wording.say import say

PROMPT, DIM = 12, 8
Passes = Callable[..., dict[str, ProbePass]]


@pytest.fixture
def passes(arm_records: ModuleType) -> Passes:
    """Makes a server's passes, with a shift in nats in prefill or decode under some conditions."""

    def make(**shifts: Mapping[str, float]) -> dict[str, ProbePass]:
        return {
            condition: arm_records.arm(*sorted(features), number=number, why="sides", **shifts.get(condition, {}))
            for number, (condition, features) in enumerate(CONDITIONS.items())
        }

    return make


def judged(passes: Passes, **shifts: Mapping[str, float]) -> Any:
    reference = passes()
    return judge_probes(reference, passes(**shifts), limits_of(reference, "float32", [], Policy()))


def test_equal_servers_pass_and_say_what_the_probes_covered(passes: Passes) -> None:
    suite = judged(passes)
    assert (suite.verdict, suite.p_regression) == ("pass", None)
    assert say(suite.why[0]) == "Every probe is within 1e-06 nats of mean KL (rounding, since no other noise is declared)."
    assert say(suite.why[-1]).startswith(
        "3 probes of 12 to 12 tokens, in prefill and up to 6 steps of decode, cold, after a cached prefix"
    )
    assert {metric.part for metric in suite.metrics} >= {"cold-prefill", "continued-decode"}


@pytest.mark.parametrize("condition", CONDITIONS)
@pytest.mark.parametrize("measure", ["prefill", "decode"])
def test_a_difference_under_one_condition_is_a_regression_that_names_it(passes: Passes, condition: str, measure: str) -> None:
    suite = judged(passes, **{condition: {measure: 0.5}})
    assert suite.verdict == "regression"
    assert suite.p_regression is not None
    assert suite.p_regression < 1e-6
    values = suite.why[0].values
    assert (values["condition"], values["measure"], values["conditions"]) == (condition, measure, [condition])
    assert values["mean"] > 0.1 > values["bound"]
    assert values["written"] == (measure == "decode")


def test_what_the_reference_shows_too_is_no_difference(passes: Passes) -> None:
    both = passes(cached={"decode": 0.5})
    assert judge_probes(both, both, limits_of(both, "float32", [], Policy())).verdict == "pass"


def test_a_floor_excuses_no_more_than_its_dtype_rounds(passes: Passes) -> None:
    reference = passes(batched={"decode": 0.5})
    assert max(bound.mean for bound in limits_of(reference, "float32", [], Policy()).values()) < 1e-5


def test_declared_noise_and_the_policy_widen_the_bounds(passes: Passes) -> None:
    reference = passes()
    exact, noisy = (limits_of(reference, "float32", noise, Policy())["decode"].mean for noise in ([], ["fp8_kv"]))
    assert exact < noisy < limits_of(reference, "float32", [], Policy(logits_limit=0.05))["decode"].mean


def test_a_condition_that_was_not_met_forbids_a_pass(passes: Passes) -> None:
    candidate = passes()
    candidate["cached"] = candidate["cached"].model_copy(update={"seen": {}, "unseen": {"prefix-cache": "0 of 12 came"}})
    reference = passes()
    suite = judge_probes(reference, candidate, limits_of(reference, "float32", [], Policy()))
    assert suite.verdict == "inconclusive"
    assert "0 of 12 came" in say(*suite.why)


def test_the_traced_place_is_where_the_sides_are_farthest_apart(passes: Passes, arm_records: ModuleType) -> None:
    for prefill, index in ((0.5, arm_records.SHARED + 1), (0.0, arm_records.PROMPT)):
        candidate = passes(batched={"decode": 0.6, "prefill": prefill})
        features, place = farthest(list(passes().values()), list(candidate.values()))
        assert (features, place.index) == (("batch",), index), "in decode only where prefill is much nearer"
    features, place = farthest(list(passes().values()), [])
    assert (features, place.index) == (("prefix-cache",), arm_records.PROMPT + arm_records.DEPTH - 1), "in turn: the last token"


@pytest.fixture
def reported(tmp_path: Path, runs: ModuleType, passes: Passes) -> Callable[..., Report]:
    """Builds the report of a run whose servers answered the probes, and were traced."""

    def report(spoiled: tuple[str, ...] = (), requests: int = 1, traced: bool = True, **shifts: Mapping[str, float]) -> Report:
        folder = runs.run_of(tmp_path, runs.spec_of("torch_native", candidate_arg=("--page-size=16",)))
        place = TracedPlace(probe="0+8", index=PROMPT)
        for role in ROLES:
            own = passes(**shifts) if role == "candidate" else passes()
            whys = (("trace", "trace again") if role == "reference" else ("trace",)) if traced else ()
            again = [own["cached"].model_copy(update={"number": 4 + n, "why": why, "traced": place}) for n, why in enumerate(whys)]
            for record in (*own.values(), *again):
                record_pass(folder.server_folder(role), record, folder.nonce)
            for record in again:
                for number in range(requests if role == "candidate" else 1):
                    _trace(folder, role, record.label, number, spoiled if role == "candidate" else ())
        return build(folder)

    return report


def _trace(folder: RunFolder, role: Role, label: str, number: int, spoiled: tuple[str, ...]) -> None:
    generator, kept = torch.Generator().manual_seed(0), {}
    for name in (f"{kind}{layer}" for layer in range(2) for kind in ("q.", "new_k.", "new_v.", "k.", "v.", "layer.")):
        kept[name] = torch.randn(PROMPT, 2, DIM, generator=generator)
        kept[name][:, 0] *= 1.5 if name in spoiled else 1.0
    header = TraceHeader(run=folder.nonce, request=f"r{number}", phase="extend", number=number, rank=0, ranks=1)
    write_pass(folder.server_folder(role), label, torch.arange(PROMPT), torch.arange(PROMPT), kept, header)


@pytest.mark.parametrize(
    ("spoiled", "where"),
    [
        (("q.1", "new_k.1", "k.1"), "layer 1, before attention, head 0"),
        (("layer.0", "q.1"), "layer 0, attention, head 0"),
        ((), "after the attention of layer 1"),
    ],
)
def test_a_report_names_where_two_servers_part(reported: Callable[..., Report], spoiled: tuple[str, ...], where: str) -> None:
    row = reported(spoiled, cached={"decode": 0.5}).parting
    assert row is not None
    assert (row.probe, row.where, row.inside.id) == ("0+8", where, "inside-the-model")


@pytest.mark.parametrize(
    ("shifts", "verdict", "decided_by"), [({}, "pass", "mean-kl"), ({"batched": {"decode": 0.5}}, "regression", "probe-kl")]
)
def test_prompts_and_probes_are_one_suite_of_which_the_worse_decides(
    reported: Callable[..., Report], runs: ModuleType, tmp_path: Path, shifts: Any, verdict: str, decided_by: str
) -> None:
    reported(traced=False, **shifts)
    folder = RunFolder(tmp_path)
    runs.score_both(folder, runs.scored)
    (suite,) = (suite for suite in build(folder).suites if suite.id == "logits")
    assert suite.verdict == verdict
    assert suite.decided_by.startswith(decided_by)
    assert {metric.quantity for metric in suite.metrics} == {
        "mean-kl",
        "likelihood-change",
        "far-prompts",
        "not-finite",
        "probe-kl",
    }
    assert [row.condition for row in suite.logits] == ["cold", "cached"]
    said = say(*suite.why)
    assert ("Generated" in said or "generated token" in said) == (verdict == "regression")


def test_a_trace_of_another_request_is_not_observed(reported: Callable[..., Report]) -> None:
    row = reported(requests=2, cached={"decode": 0.5}).parting
    assert row is not None
    assert (row.where, row.inside.id) == ("", "inside-not-observed")


def test_sides_that_differ_in_a_flag_need_the_probes(
    tmp_path_factory: pytest.TempPathFactory, runs: ModuleType, reported: Callable[..., Report]
) -> None:
    folder = runs.run_of(tmp_path_factory.mktemp("bare"), runs.spec_of("torch_native", candidate_arg=("--page-size=16",)))
    (check,) = (check for check in build(folder).checks if check.id == "probes-compared")
    assert check.status == "missing"
    (check,) = (check for check in reported().checks if check.id == "probes-compared")
    assert check.status == "ok"
