"""The verdict on logits: what passes, what regresses, and what cannot be judged."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from scipy.special import ndtri

from assay.harness.attention.noise import FAMILIES
from assay.harness.config import RunSpec
from assay.harness.evidence.fingerprint import FINGERPRINT, Fingerprint, RopeTable
from assay.harness.evidence.folder import RunFolder
from assay.harness.evidence.logit_files import Logits, logits_path, read_logits, write_logits
from assay.harness.evidence.records import FLOOR_REPEAT
from assay.harness.judge.build import build
from assay.harness.judge.logits_suite import FLOOR_FACTOR, MIN_PROMPTS, WITNESS, _compare_logits, judge_logits
from assay.harness.judge.noise_limits import EXACT_KL, EXACT_SWING, MAX_SWING, _relative_error, change_limit, kl_limit, swing_limit
from assay.harness.judge.probe_scores import kernel_cost
from assay.harness.judge.report import SuiteResult
from assay.harness.policy import WIDEST_LOGITS_LIMIT
from assay.harness.statement import Statement
from assay.reports.wording.say import say

Change = Callable[[str, np.ndarray], np.ndarray]


@pytest.fixture
def judged(tmp_path: Path, runs: ModuleType) -> Callable[..., SuiteResult]:
    """The suite's result for a candidate whose logits have noise, and are changed."""

    def judge(
        noise: float = 0.0,
        change: Change | None = None,
        prompts: int = MIN_PROMPTS,
        declared: tuple[str, ...] = (),
        floor: float = 0.0,
        reference: Change | None = None,
        honest: float = EXACT_KL,
        **policy: Any,
    ) -> SuiteResult:
        spec: RunSpec = runs.spec_of(suites=("logits",), **policy)
        folder: RunFolder = runs.run_of(tmp_path / f"run-{len(list(tmp_path.iterdir()))}", spec)
        scored = partial(runs.scored, run=folder.nonce)
        write_logits(folder.path, scored("reference", prompts, change=reference))
        write_logits(folder.path, scored("reference", prompts, noise=floor, seed=2, repeat=FLOOR_REPEAT, change=reference))
        write_logits(folder.path, scored("candidate", prompts, noise=noise, seed=1, change=change))
        comparison = _compare_logits(folder.path, folder.nonce)
        return judge_logits(comparison, spec.policy, declared, honest, synthetic=True)

    return judge


def nowhere_finite(condition: str, logits: np.ndarray) -> np.ndarray:
    return logits * math.nan


def one_is_nan(condition: str, logits: np.ndarray) -> np.ndarray:
    changed = logits.copy()
    if condition == "cached":
        changed[17, 2] = math.nan
    return changed


def certain_of_another(condition: str, logits: np.ndarray) -> np.ndarray:
    """KL 22 nats: no position has the same first token."""
    return np.asarray(logits[:, ::-1] * 4)


def excludes_a_token(condition: str, logits: np.ndarray) -> np.ndarray:
    changed = logits.copy()
    changed[3, 1] = -math.inf
    return changed


def behind_a_prefix(condition: str, logits: np.ndarray) -> np.ndarray:
    return certain_of_another(condition, logits) if condition == "cached" else logits


@pytest.mark.parametrize("change", [nowhere_finite, one_is_nan, excludes_a_token])
def test_what_is_not_finite_is_a_regression(judged: Callable[..., SuiteResult], change: Change) -> None:
    suite = judged(change=change)
    assert (suite.verdict, suite.p_regression, suite.decided_by) == ("regression", 0.0, "not-finite")
    assert [why.id for why in suite.why] == ["candidate-not-finite"]
    assert suite.why[0].values["places"][-1] == [{nowhere_finite: 1_280}.get(change, 1), 1_280, "cached"]


@pytest.mark.parametrize("change", [certain_of_another, behind_a_prefix])
def test_other_distributions_are_a_regression(judged: Callable[..., SuiteResult], change: Change) -> None:
    suite = judged(change=change, noise=0.01)
    assert suite.verdict == "regression"
    assert suite.p_regression is not None
    assert suite.p_regression < 0.005
    assert suite.decided_by == "mean-kl-cached" or change is certain_of_another
    cached = suite.logits[1]
    assert cached.same_top == 0.0
    assert cached.mean_kl is not None
    assert cached.mean_kl > 15


def test_logits_that_were_requested_and_not_scored_are_missing(tmp_path: Path, runs: ModuleType) -> None:
    folder = runs.run_of(tmp_path / "run", runs.spec_of(suites=("logits",)))
    (check,) = [check for check in build(folder).checks if check.id == "logits-compared"]
    assert check.status == "missing"


def test_equal_logits_pass(judged: Callable[..., SuiteResult]) -> None:
    suite = judged()
    assert (suite.verdict, suite.p_regression) == ("pass", 1.0)
    assert [metric.id for metric in suite.metrics] == [
        "mean-kl-cold", "likelihood-change-cold", "far-prompts-cold",
        "mean-kl-cached", "likelihood-change-cached", "far-prompts-cached", "not-finite",
    ]  # fmt: skip
    assert suite.deciding_metric is not None
    assert suite.deciding_metric.bound is not None


def test_noise_passes_in_the_family_that_declares_it_and_in_no_smaller_one(judged: Callable[..., SuiteResult]) -> None:
    size = math.sqrt(0.6 * kl_limit(["int8_qk"]) / 0.31)  # with these logits, normal noise of size s has a mean KL of 0.31 s^2
    assert judged(noise=size, declared=("", "int8_qk")).verdict == "pass"
    exact = judged(noise=size)
    assert (exact.verdict, exact.decided_by[:8]) == ("regression", "mean-kl-")
    limit = exact.why[0].values["limit"].values
    assert (limit["source"], limit["noise"]) == ("noise", [])


def test_the_limit_is_a_multiple_of_the_floor_where_that_is_larger(judged: Callable[..., SuiteResult]) -> None:
    suite = judged(noise=0.1, floor=0.1)
    kl, floor = suite.metrics[0], suite.logits[0].floor_mean_kl
    assert suite.verdict == "pass"
    assert floor is not None
    assert kl.bound == pytest.approx(FLOOR_FACTOR * floor)
    assert judged(noise=0.3, floor=0.1).verdict == "regression"


def test_a_policy_sets_the_limit(judged: Callable[..., SuiteResult]) -> None:
    assert judged(noise=0.1).verdict == "regression"
    assert judged(noise=0.1, logits_limit=0.05).verdict == "pass"
    strict = judged(noise=0.01, logits_limit=1e-6)
    assert strict.verdict == "regression"
    assert "logits_limit = 1e-06" in strict.why[0].values["policy"]


def test_a_change_outside_of_the_compared_tokens_shows_in_the_likelihood(judged: Callable[..., SuiteResult]) -> None:
    """The sequence's own token is improbable, and KL_k cannot see it."""

    def reference(condition: str, logits: np.ndarray) -> np.ndarray:
        changed = logits.copy()
        changed[:, 0] = -9.0
        return changed

    def candidate(condition: str, logits: np.ndarray) -> np.ndarray:
        changed = reference(condition, logits)
        changed[:, 0] = -9.5
        return changed

    suite = judged(reference=reference, change=candidate)
    assert (suite.verdict, suite.decided_by) == ("regression", "likelihood-change-cold")
    assert suite.deciding_metric is not None
    assert suite.deciding_metric.values["change"] == pytest.approx(-0.5, rel=1e-4)
    assert suite.why[0].values["value"] == pytest.approx(-0.5, rel=1e-4)
    kl = suite.metrics[0]
    assert kl.value is not None
    assert kl.bound is not None
    assert kl.value < kl.bound


def test_fewer_prompts_give_no_verdict(judged: Callable[..., SuiteResult]) -> None:
    for suite in (judged(prompts=MIN_PROMPTS - 1), judged(prompts=8, change=certain_of_another)):
        assert (suite.verdict, suite.p_regression) == ("inconclusive", None)
        assert [why.id for why in suite.why] == ["too-few-scored"]
        assert suite.why[0].values["prompts"] < suite.why[0].values["least"] == 64
    assert judged(prompts=8, change=one_is_nan).verdict == "regression"


def test_a_reference_that_is_not_finite_blames_nobody(judged: Callable[..., SuiteResult]) -> None:
    suite = judged(reference=one_is_nan)
    assert (suite.verdict, suite.p_regression) == ("inconclusive", None)
    assert [why.id for why in suite.why] == ["reference-not-finite"]


def test_without_a_cached_prefix_there_is_no_verdict(tmp_path: Path, runs: ModuleType) -> None:
    spec = runs.spec_of(suites=("logits",))
    folder = runs.run_of(tmp_path / "run", spec)
    runs.score_both(folder, runs.scored)
    path = logits_path(folder.path, "candidate", 0)
    logits: Logits = read_logits(path)
    sequences = tuple(s.model_copy(update={"cached": {"cold": 0, "cached": 0}}) for s in logits.header.sequences)
    write_logits(folder.path, replace(logits, header=logits.header.model_copy(update={"sequences": sequences})))
    suite = judge_logits(_compare_logits(folder.path, folder.nonce), spec.policy, (), synthetic=True)
    assert suite.verdict == "inconclusive"
    [missed] = suite.why[0].values["not_observed"]
    assert (missed.id, missed.values["condition"], missed.values["required"]) == ("not-cached-as-required", "cached", 16)


@pytest.fixture
def on_means(tmp_path: Path, runs: ModuleType) -> Callable[..., SuiteResult]:
    """The suite's result for mean KLs of prompts, in multiples of the limit of rounding."""
    spec: RunSpec = runs.spec_of(suites=("logits",))
    folder: RunFolder = runs.run_of(tmp_path / "run", spec)
    for role in ("reference", "candidate"):
        write_logits(folder.path, runs.scored(role, MIN_PROMPTS, run=folder.nonce))
    comparison = _compare_logits(folder.path, folder.nonce)

    def judge(multiples: np.ndarray, floor: float = 0.0) -> SuiteResult:
        kl = multiples * kl_limit(())
        prompts = tuple(replace(one, kl=kl, change=np.zeros(len(kl)), floor=np.full(32, floor)) for one in comparison.prompts)
        return judge_logits(replace(comparison, prompts=prompts), spec.policy, (), synthetic=True)

    return judge


@pytest.mark.parametrize(("wrong", "verdict"), [(0, "pass"), (1, "inconclusive"), (6, "regression")])
def test_prompts_far_beyond_the_limit_are_no_pass_and_some_are_a_regression(
    on_means: Callable[..., SuiteResult], wrong: int, verdict: str
) -> None:
    multiples = np.full(MIN_PROMPTS, 0.01) * np.linspace(0.8, 1.2, MIN_PROMPTS)
    multiples[:wrong] = 21.0
    suite = on_means(multiples)
    assert suite.verdict == verdict
    assert [why.id for why in suite.why] == {
        "pass": ["logits-within", "bug-unseen"],
        "inconclusive": ["prompts-far", "mean-not-shown"],
        "regression": ["prompts-too-far"],
    }[verdict]
    if wrong == 1:
        numbers = suite.why[0].values
        assert (numbers["count"], numbers["prompts"], numbers["times"], numbers["worst"]) == (1, 64, 20, 21.0 * kl_limit(()))


def test_a_heavy_tail_is_no_pass_however_small_its_mean(on_means: Callable[..., SuiteResult]) -> None:
    rank = (np.arange(MIN_PROMPTS) + 0.5) / MIN_PROMPTS
    light, heavy = (0.1 * np.exp(sigma * ndtri(rank)) for sigma in (1.2, 2.0))
    assert on_means(light).verdict == "pass"
    assert heavy.mean() < 0.7
    suite = on_means(heavy)
    assert suite.verdict == "inconclusive"
    assert [why.id for why in suite.why] == ["heavy-tail", "mean-not-shown"]
    assert suite.why[0].values["spread"] > suite.why[0].values["most"]
    assert on_means(heavy * 1e-2).verdict == "pass", "no prompt is beyond the limit"
    equal = on_means(np.array([0.0] * 40 + [0.1] * 23 + [1.5]))
    assert "heavy-tail" not in {why.id for why in equal.why}, "equal distributions are no tail"


def test_an_erratic_reference_raises_the_limit_to_the_widest_of_a_policy_and_no_further(
    on_means: Callable[..., SuiteResult],
) -> None:
    metric = next(one for one in on_means(np.full(MIN_PROMPTS, 0.01), floor=8.0).metrics if one.id == "mean-kl-cold")
    assert metric.bound == WIDEST_LOGITS_LIMIT


def test_where_no_shadow_compares_layers_in_float32_the_limit_is_what_another_kernel_costs_there(
    judged: Callable[..., SuiteResult],
) -> None:
    """A softmax scale times 1.1 in one of four layers of vLLM cost 1e-4 nats, less than rounding may cost in bfloat16."""
    noise = 0.02
    assert judged(noise=noise).verdict == "pass"
    assert judged(noise=noise, honest=kernel_cost("float32")).verdict == "regression"
    assert judged(noise=noise, honest=kernel_cost("float32"), declared=("int8_qk",)).verdict == "pass"


def test_a_kernel_that_declares_nothing_gets_what_rounding_explains() -> None:
    assert _relative_error("") == 0.0
    assert kl_limit([]) == kl_limit(["", ""]) == EXACT_KL
    assert swing_limit([]) == swing_limit(["", ""]) == EXACT_SWING


def test_coarser_storage_has_larger_limits() -> None:
    order = ["", "fp16_accumulation", "int8_qk", "fp8_kv", "fp8_qkv", "fp8_e5m2_kv"]
    limits = [kl_limit([name]) for name in order]
    assert limits == sorted(limits)
    assert len(set(limits)) == len(order)
    assert kl_limit(["int8_qk", "int8_qk"]) - EXACT_KL == pytest.approx(2 * (kl_limit(["int8_qk"]) - EXACT_KL))


@pytest.mark.parametrize("name", FAMILIES)
def test_no_family_excuses_a_certain_swap(name: str) -> None:
    assert EXACT_SWING <= swing_limit([name, name]) <= MAX_SWING < 16
    assert 0 < kl_limit([name]) < 0.2


def test_what_was_measured_for_int8_is_within_its_limits_with_room() -> None:
    assert 6.3e-5 * 10 <= kl_limit(["int8_qk"]) <= 1e-3
    assert 0.95 * 2 <= swing_limit(["int8_qk"]) <= 3


def test_a_log_likelihood_changes_by_at_most_the_root_of_twice_the_kl() -> None:
    assert change_limit(2e-4) == pytest.approx(0.02)


def test_a_witness_names_the_side_that_is_off_unless_it_contradicts_its_folder(tmp_path: Path, runs: ModuleType) -> None:
    folder: RunFolder = runs.run_of(tmp_path / "run", runs.spec_of(suites=("logits",)))
    runs.score_both(folder, partial(runs.scored, noise=0.3, seed=1))
    place = folder.path / WITNESS

    def opinion(noise: float, wrong: str = "") -> list[Statement]:
        """What the suite says of a witness whose scores have noise, and whose RoPE may be wrong."""
        write_logits(place, runs.scored("candidate", MIN_PROMPTS, noise=noise, seed=1, run=folder.nonce))
        table = RopeTable(name="rope", kind="R", dtype="float32", frequencies=(1.0,), digest="", wrong=wrong)
        told = Fingerprint(run=folder.nonce, source="server", engine="transformers 5", model="tiny", rope=(table,))
        FINGERPRINT.write(place, told)
        return [each for suite in build(folder).suites for each in suite.why if "witness" in each.id]

    assert not [each for suite in build(folder).suites for each in suite.why if "witness" in each.id]
    for noise, near in ((1e-6, "reference"), (0.3, "candidate"), (0.15, "")):
        (said,) = opinion(noise)
        assert (said.id, said.values["near"], said.values["tokens"]) == ("witness", near, 20 * MIN_PROMPTS), noise
        assert f"agrees with {f'the {near}' if near else 'neither side'}" in say(said)
    assert say(said).startswith(
        "transformers 5 in float32 agrees with neither side on 1,280 tokens, cold and cached: the reference is"
    )
    runs.score_both(folder, partial(runs.scored, noise=1e-4, seed=1))
    for noise, near in ((1e-6, "both"), (0.3, "")):
        assert opinion(noise)[0].values["near"] == near
    assert "agrees with both sides on" in say(opinion(1e-6)[0])
    (said,) = opinion(1e-6, wrong := "rope_theta is 15,000; config.json says 10,000")
    assert say(said) == f"transformers 5 is not a witness here, because it contradicts the model's folder: {wrong}."
