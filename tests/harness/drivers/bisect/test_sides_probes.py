"""``assay bisect sides`` without servers: its folder, how it goes on, and what it says."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import nullcontext
from pathlib import Path

import pytest
from rich.console import Console

from assay.harness.config import RunSpec
from assay.harness.drivers.bisect import sides_probes
from assay.harness.drivers.bisect.sides import SidePair
from assay.harness.drivers.bisect.sides_probes import bisect_sides
from assay.harness.drivers.bisect.sides_task import Difference, Evidence, SidesProbe
from assay.harness.errors import EngineError, UsageError
from assay.harness.progress import ProgressDisplay
from assay.harness.sides import Side
from assay.reports.bisection import sides_document
from assay.reports.terminal import render

FLAGS = ("--page-size=16", "--chunked-prefill-size=64", "--disable-radix-cache")


def spec(**more: object) -> RunSpec:
    return RunSpec.of(
        suites="accuracy,greedy,logits", questions=8, candidate_arg=FLAGS, candidate_env=("A=1", "B=2", "C=3"), **more
    )


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[set[str]]:
    """The sets that are probed: B breaks the candidate together with the chunk size; C is not served."""
    sets: list[set[str]] = []

    def compared(self: object, chosen: Sequence[Difference], kinds: Sequence[Evidence]) -> SidesProbe:
        names = {each.name for each in chosen}
        sets.append(names)
        if names == {"C"} or ("C" in names and "A" not in names):
            raise EngineError("the server did not start.")
        bad = {"B", "--chunked-prefill-size"} <= names
        return SidesProbe(applied=(), outcome="bad" if bad else "good", by="logits", value=0.5 if bad else 1e-6, limit=1e-4)

    def nothing(self: object, kinds: Collection[Evidence]) -> None:
        return

    monkeypatch.setattr(sides_probes._Prober, "_compared", compared)
    monkeypatch.setattr(sides_probes._Prober, "_ask_reference", nothing)
    return sets


def quiet() -> ProgressDisplay:
    return ProgressDisplay(Console(quiet=True))


def test_the_smallest_set_is_named_with_the_run_that_shows_it(asked: list[set[str]], tmp_path: Path) -> None:
    result, folder = bisect_sides(spec(), tmp_path / "out", quiet())
    assert (result.outcome, result.exit_code, result.steady) == ("found", 1, True)
    assert result.sets == (("--chunked-prefill-size=64", "environment.B=2"),)
    (finding,) = result.findings
    assert finding.where == "--chunked-prefill-size=64, environment.B=2"
    assert "--candidate-arg=--chunked-prefill-size=64 --candidate-env=B=2" in finding.reproduce
    assert "--candidate-env=A=1" not in finding.reproduce
    assert {each.id for each in finding.shown_by} == {"broken-by-differences", "part-of-differences"}
    console = Console(record=True, width=200, file=open("/dev/null", "w"))  # noqa: SIM115
    render(sides_document(result), console, True)
    text = console.export_text()
    assert "Broken by: --chunked-prefill-size=64, environment.B=2" in text
    assert "these differences break the candidate only together; without any of them, the same probes show no loss" in text
    assert "with these 2 differences, the mean KL of the log-probabilities is 0.5 nats, and 0.0001 is allowed" in text
    assert folder == tmp_path / "out"


def test_a_bisection_goes_on_where_it_stopped(asked: list[set[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, _ = bisect_sides(spec(), tmp_path / "whole", quiet())
    every = len(asked)
    asked.clear()
    compared = sides_probes._Prober._compared

    def stopped(self: sides_probes._Prober, chosen: Sequence[Difference], kinds: Sequence[Evidence]) -> SidesProbe:
        if len(asked) == 4:
            raise KeyboardInterrupt
        return compared(self, chosen, kinds)

    with monkeypatch.context() as patch:
        patch.setattr(sides_probes._Prober, "_compared", stopped)
        with pytest.raises(KeyboardInterrupt):
            bisect_sides(spec(), tmp_path / "out", quiet())
    (tmp_path / "out" / "probes.jsonl").open("a").write('{"applied": ["cut')
    again, _ = bisect_sides(spec(), tmp_path / "out", quiet())
    assert (again.sets, again.why) == (whole.sets, whole.why)
    assert len(asked) == every
    assert bisect_sides(spec(), tmp_path / "out", quiet())[0].probes == again.probes


def test_another_question_and_another_folder_are_refused(asked: list[set[str]], tmp_path: Path) -> None:
    bisect_sides(spec(), tmp_path / "out", quiet())
    with pytest.raises(UsageError, match="holds another bisection"):
        bisect_sides(spec(margin=0.03), tmp_path / "out", quiet())
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "file").touch()
    with pytest.raises(UsageError, match="holds no bisection"):
        bisect_sides(spec(), tmp_path / "other", quiet())
    with pytest.raises(UsageError, match="do not differ"):
        bisect_sides(RunSpec.of(reference="torch_native", candidate="torch_native", questions=8), tmp_path / "none", quiet())


@pytest.mark.parametrize(
    ("by", "verdicts", "outcome", "asked"),
    [
        (None, {"logits": "regression"}, "bad", ["logits"]),
        (None, {"logits": "pass", "texts": "pass"}, "good", ["logits", "texts"]),
        (None, {"logits": "inconclusive", "texts": "pass", "answers": "regression"}, "bad", ["logits", "texts", "answers"]),
        (None, {"logits": "inconclusive", "texts": "pass", "answers": "pass"}, "good", ["logits", "texts", "answers"]),
        (None, {"logits": "inconclusive", "texts": "pass", "answers": "inconclusive"}, "skip", ["logits", "texts", "answers"]),
        ("texts", {"texts": "inconclusive"}, "good", ["texts"]),
        ("answers", {"answers": "regression"}, "bad", ["answers"]),
    ],
)
def test_the_cheapest_evidence_decides(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, by: Evidence | None, verdicts: dict[str, str], outcome: str, asked: list[str]
) -> None:
    kinds: list[str] = []
    prober = sides_probes._Prober
    monkeypatch.setattr(prober, "_engine", lambda *_: None)
    monkeypatch.setattr(prober, "_ask_reference", lambda *_: None)
    monkeypatch.setattr(prober, "_ask", lambda self, engine, plan, role, kind: kinds.append(kind))
    monkeypatch.setattr(prober, "_judge", lambda self, plan, kind, own: (verdicts[kind], 1.0, 0.5))
    monkeypatch.setattr(sides_probes, "running", lambda *_: nullcontext())
    side = Side(backend="torch_native")
    pair = SidePair(side, side.model_copy(update={"environment": {"MINE": "1"}}), (tmp_path, tmp_path))
    made = prober(spec(), pair, tmp_path, "", quiet())
    made.by = by
    (tmp_path / "config.json").write_text("{}")
    probed = made.probe(pair.differences())
    assert (probed.outcome, kinds) == (outcome, asked)
    assert probed.by == (asked[-1] if outcome != "skip" else None)
    assert bool(probed.problem) == (outcome == "skip")


def test_a_fingerprint_decides_about_what_it_knows_alone() -> None:
    seen = [
        sides_probes._is_seen(Difference(kind=kind, name=name))
        for kind, name in (
            ("flag", "--a"), ("file", "tokenizer.json"), ("config", "config.json: a"),
            ("variable", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE"), ("variable", "MINE"), ("package", "fact"), ("interpreter", "Python"),
        )
    ]  # fmt: skip
    assert seen == [True] * 4 + [False] * 3
