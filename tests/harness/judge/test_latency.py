from __future__ import annotations

from typing import Any

import pytest

from assay.harness.errors import EvidenceError
from assay.harness.judge.blocks import METRICS
from assay.harness.judge.latency import judge_bench
from assay.harness.statement import state

MakeBench = Any
SHAPES = ("short", "shared", "chunked")


def test_equal_servers_pass(make_bench: MakeBench) -> None:
    result = judge_bench(make_bench())
    assert result.verdict == "pass"
    assert (result.rounds, result.warm_up_rounds) == (10, 1), "the first round was slow, in both roles"
    loads = {(shape, concurrency) for shape in SHAPES for concurrency in (1, 4)}
    assert {(load.shape, load.concurrency) for load in result.loads} == loads
    assert {load.rounds for load in result.loads} == {9}
    assert len(result.rows) == len(loads) * len(METRICS)
    for row in result.rows:
        assert row.why.values["ratios"] == 18
        assert None not in (row.ratio, row.low, row.high)
        assert row.low <= 1.0 <= row.high or abs(row.ratio - 1) < 0.01  # type: ignore[operator]
    assert result.findings == ()


def test_a_candidate_that_is_slower_in_one_shape_is_a_regression_there(make_bench: MakeBench) -> None:
    result = judge_bench(make_bench(slow={"shared": 1.3}))
    assert result.verdict == "regression"
    by_shape = {shape: {row.verdict for row in result.rows if row.shape == shape} for shape in SHAPES}
    assert by_shape["shared"] >= {"regression"}
    assert by_shape["short"] == by_shape["chunked"] == {"pass"}
    assert {finding.where for finding in result.findings} == {"shared, 1 in flight", "shared, 4 in flight"}
    assert all(finding.id == "latency" and finding.reproduce == "assay bench" for finding in result.findings)
    result = judge_bench(make_bench(slow={"shared": 1.3}, flags={"latency_bound": 1.5}))
    assert (result.verdict, result.policy) == ("pass", "latency_bound = 1.5 (--latency-bound)")


def test_a_few_rounds_prove_nothing(make_bench: MakeBench) -> None:
    result = judge_bench(make_bench(rounds=3, slow={"short": 2.0}))
    assert result.verdict == "inconclusive"
    assert {(row.why.values["reason"], row.why.values["ratios"], row.why.values["least"]) for row in result.rows} == {
        ("too few", 4, 6)
    }


def test_a_reference_that_is_slower_than_itself_proves_nothing(make_bench: MakeBench) -> None:
    result = judge_bench(make_bench(floor=1.4, slow={"short": 1.8, "shared": 1.8, "chunked": 1.8}))
    assert result.verdict == "inconclusive"
    assert {row.why.values["reason"] for row in result.rows} == {"too noisy"}


@pytest.mark.parametrize(
    ("wrong", "unmet", "value"),
    [
        ({"cached": False}, {"shared-prefix-shared-1", "shared-prefix-shared-4"}, ("candidate", 0.0)),
        ({"arguments": {"page_size": 16}}, {"same-servers"}, ("arguments", [["page_size", "1", "16"]])),
        (
            {"arguments": {"chunked_prefill_size": 8192}}, {"same-servers", "chunked-chunked"},
            ("sizes", [["reference", "128"], ["candidate", "8192"]]),
        ),
        ({"interpreted": True}, {"device-kernels"}, ("kernels", ["torch_native"])),
        ({"counted": False}, {"kernel-ran-extend", "kernel-ran-decode"}, ("phase", "decode")),
    ],
)  # fmt: skip
def test_a_check_that_is_not_met_forbids_a_pass(
    make_bench: MakeBench, wrong: dict[str, Any], unmet: set[str], value: tuple[str, Any]
) -> None:
    result = judge_bench(make_bench(**wrong))
    assert result.verdict == "inconclusive"
    checks = [check for check in result.checks if check.status in ("failed", "missing")]
    assert {check.id for check in checks} == unmet
    assert value in checks[-1].outcome.values.items()


@pytest.mark.parametrize(("tokens", "status"), [(128, "ok"), (512, "missing")])
def test_chunks_are_those_of_the_engine(make_bench: MakeBench, tokens: int, status: str) -> None:
    result = judge_bench(make_bench(kind="vllm", arguments={"scheduler_config": {"max_num_batched_tokens": tokens}}))
    (check,) = [check for check in result.checks if check.id == "chunked-chunked"]
    assert (check.status, check.outcome.values["sizes"][1]) == (status, ["candidate", str(tokens)])


def test_arguments_that_follow_from_the_treatment_do_not_forbid_a_pass(make_bench: MakeBench) -> None:
    settings = {"flags": {"candidate_arg": ("--kv-cache-dtype=auto",)}, "arguments": {"graph_sizes": 8}}
    assert judge_bench(make_bench(**settings)).verdict == "inconclusive"
    result = judge_bench(make_bench(**settings, resolved=True))
    assert result.verdict == "pass"
    same = next(check for check in result.checks if check.id == "same-servers")
    assert same.outcome.values["derived"] == ["graph_sizes"]


def test_servers_that_did_not_serve_the_same_are_no_pass(make_bench: MakeBench) -> None:
    def same_servers(**packages: str) -> Any:
        result = judge_bench(make_bench(packages=packages))
        return result.verdict, next(check for check in result.checks if check.id == "same-servers")

    verdict, check = same_servers(reference="2", candidate="3")
    assert (verdict, check.status) == ("inconclusive", "failed")
    assert check.outcome == state("served-otherwise", said=["torch is 2 in A, 3 in B"])
    verdict, check = same_servers(reference="2", candidate="2")
    assert (verdict, check.status) == ("pass", "ok")
    assert check.outcome.values["parts"] == 1


def test_timings_that_are_not_as_they_were_are_not_judged(make_bench: MakeBench) -> None:
    folder = make_bench()
    (folder.path / "timings.jsonl").unlink()
    with pytest.raises(EvidenceError, match=r"not as it was when the run ended: timings\.jsonl was removed"):
        judge_bench(folder)
    (folder.path / "end.json").unlink()
    with pytest.raises(EvidenceError, match="no bench that was played to its end"):
        judge_bench(folder)


def test_the_interpreters_time_gives_no_regression(make_bench: MakeBench) -> None:
    result = judge_bench(make_bench(interpreted=True, slow={"short": 50.0}))
    assert result.verdict == "inconclusive"


def test_a_folder_without_a_complete_round_is_no_evidence(make_bench: MakeBench) -> None:
    with pytest.raises(EvidenceError, match="holds no timings"):
        judge_bench(make_bench(rounds=0))


def test_rare_requests_that_are_slow_by_far_are_no_pass(make_bench: MakeBench) -> None:
    """One request in 50 takes 20 times as long: no median moves, the mean is 1.38 times the reference's."""
    result = judge_bench(make_bench(rounds=60, tail=0.02))
    assert result.verdict == "regression"
    rows = [row for row in result.rows if row.metric == "e2e" and row.concurrency == 4]
    assert all(row.high is not None and row.high < 1.1 < (row.mean or 0.0) for row in rows)
    assert "mean above" in {row.why.values["reason"] for row in result.rows}
    few = judge_bench(make_bench(rounds=8, tail=0.02))
    assert few.verdict == "inconclusive", "seen, but it may be chance"
    assert "mean not clear" in {row.why.values["reason"] for row in few.rows}
