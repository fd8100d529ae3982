"""The flow of a bisection, with probes whose measurements are given."""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import pytest

from assay.harness.cli.app import load_command
from assay.harness.drivers.bisect import MOST
from assay.harness.drivers.bisect.commits import bisection
from assay.harness.drivers.bisect.commits.bisection import _Bisection, bisect_commits, reproduce
from assay.harness.drivers.bisect.commits.repo import Repository
from assay.harness.drivers.bisect.commits.state import BisectFolder, BisectSpec, BisectState, CommitProbe, Measurement
from assay.harness.errors import EvidenceError, UsageError

Answer = Callable[[int], Measurement]


def measured(*errors: float) -> Measurement:
    worst = max(errors)
    return Measurement(worst=worst, own=worst, where=f"call {errors.index(worst)}")


class Bench:
    """A history, by default straight and of 40 commits, and bisections of it."""

    def __init__(self, histories: ModuleType, path: Path, parents: Sequence[tuple[int, ...]] = (), **over: object) -> None:
        made = histories.make(path / "repo", parents or histories.straight(40), lambda i: f"N = {i}\n")
        self.repository, self.commits = Repository(made.path), made.commits
        ends = {"repo": str(made.path), "good": made.commits[0], "bad": made.commits[-1], "kernel": "attn:f"}
        self.spec = BisectSpec.model_validate(ends | over)
        self.folder = BisectFolder(path / "out")

    def run(self, answer: Answer, stop_after: int = 10_000) -> tuple[BisectState, list[int]]:
        asked: list[int] = []

        def measure(commit: str, number: int, name_bug: bool) -> Measurement:
            if len(asked) == stop_after:
                raise KeyboardInterrupt
            asked.append(self.commits.index(commit))
            return answer(asked[-1])

        history = self.repository.between(self.spec.good, self.spec.bad)
        state = self.folder.read() or BisectState(spec=self.spec, command="again", history=history)
        return _Bisection(self.folder, state, measure, self.repository, lambda line: None).run(), asked


@pytest.fixture
def bench(histories: ModuleType, tmp_path: Path) -> Bench:
    return Bench(histories, tmp_path)


def planted(culprit: int) -> Answer:
    return lambda i: measured(0.1, 5.0 if i >= culprit else 0.2)


def suspects_of(bench: Bench, state: BisectState) -> list[int]:
    assert state.result is not None
    return [bench.commits.index(commit) for commit in state.result.suspects]


@pytest.mark.parametrize(
    ("outcomes", "found"),
    [
        ("g", None), ("gg", "good"), ("bb", "bad"), ("gb", None), ("gbg", None), ("gbgg", "good"), ("gbgb", None),
        ("bgbgb", "skip"),        ("bgbb", "bad"), ("s", "skip"), ("gs", "skip"), ("ggs", "good"),
    ],
)  # fmt: skip
def test_a_commit_is_classified_once_one_outcome_leads_by_two(outcomes: str, found: str | None) -> None:
    words = {"g": "good", "b": "bad", "s": "skip"}
    probes = [CommitProbe(number=1, commit="c", purpose="search", came_out=words[each], seconds=0) for each in outcomes]
    spec = BisectSpec(repo="r", good="g", bad="b", kernel="m:f")
    assert len(outcomes) <= MOST
    assert BisectState(spec=spec, command="", history={}, probes=probes).settled("c") == found


@pytest.mark.parametrize(
    ("measurement", "raises", "outcome"),
    [
        (measured(0.1, 1.0), "skip", "good"), (measured(0.1, 1.1), "skip", "bad"), (measured(math.inf), "skip", "bad"),
        (measured(math.nan), "skip", "bad"), (Measurement(status="no call"), "bad", "skip"),
        (Measurement(status="raised"), "skip", "skip"), (Measurement(status="died"), "bad", "bad"),
        (Measurement(status="build"), "bad", "skip"),
    ],
)  # fmt: skip
def test_the_worst_own_error_classifies_a_commit(measurement: Measurement, raises: Literal["skip", "bad"], outcome: str) -> None:
    assert measurement.outcome(raises) == outcome


@pytest.mark.parametrize("culprit", [1, 17, 39])
def test_it_ends_with_the_commit_and_what_changed_there(bench: Bench, culprit: int) -> None:
    state, asked = bench.run(planted(culprit))
    result = state.result
    assert result is not None
    assert suspects_of(bench, state) == [culprit]
    assert (result.outcome, result.exit_code) == ("found", 0)
    assert asked[:4] == [0, 0, 39, 39]
    assert len(asked) <= 4 + 2 * 6 + 1, "39 commits are halved in 6 steps; the last probe is the diagnosis"
    assert result.commit is not None
    assert result.commit.subject == f"Change {culprit}"
    assert [state.outcomes(bench.commits[i]) for i in (culprit, culprit - 1)] == [["bad"] * 2, ["good"] * 2]
    assert state == bench.folder.read(), "the whole state is on disk"


def test_every_commit_of_a_history_with_merges_is_found(histories: ModuleType, tmp_path: Path) -> None:
    # 0 - 1 - 2 - 5 - 6 - 7 with 1 - 3 - 4 - 5: a branch that is merged.
    parents = [(), (0,), (1,), (1,), (3,), (2, 4), (5,), (6,)]
    bench = Bench(histories, tmp_path, parents)
    for culprit in range(1, 8):
        wrong = histories.descendants(parents, culprit)
        bench.folder = BisectFolder(tmp_path / str(culprit))
        state, _ = bench.run(lambda i, wrong=wrong: measured(5.0 if i in wrong else 0.1))
        assert suspects_of(bench, state) == [culprit]


def test_a_flaky_kernel_costs_probes_and_not_the_answer(bench: Bench) -> None:
    seen: list[int] = []

    def answer(i: int) -> Measurement:
        seen.append(i)
        wrong = (i >= 23) != (seen.count(i) == 1 and i % 3 == 0)  # the first probe of every third commit is misleading
        return measured(5.0 if wrong else 0.1)

    state, _ = bench.run(answer)
    assert suspects_of(bench, state) == [23]


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (lambda i: measured(5.0), r"the good revision .* is not good: 2 probes: 2 bad; last: call 0"),
        (lambda i: measured(0.0), r"the bad revision .* is not bad: 2 probes: 2 good"),
        (lambda i: Measurement(status="build", reason="no compiler"), r"the good revision .* 1 skip; last: build: no compiler"),
    ],
)
def test_wrong_ends_stop_a_bisection_before_the_search(bench: Bench, answer: Answer, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        bench.run(answer)
    state, _ = bench.run(planted(3))
    assert suspects_of(bench, state) == [3], "once it is fixed, the same command starts again"


@pytest.mark.parametrize("stop_after", [0, 1, 2, 6, 10])
def test_a_stopped_bisection_is_resumed(bench: Bench, stop_after: int) -> None:
    with pytest.raises(KeyboardInterrupt):
        bench.run(planted(29), stop_after)
    there = bench.folder.read()
    kept = len(there.probes) if there else 0
    assert kept == stop_after
    state, asked = bench.run(planted(29))
    assert suspects_of(bench, state) == [29]
    assert len(state.probes) == kept + len(asked), "no probe is repeated"
    assert bench.run(planted(29)) == (state, [])


def test_skips_around_the_culprit_leave_a_range(bench: Bench) -> None:
    state, _ = bench.run(lambda i: Measurement(status="import", reason="no") if i in (20, 21) else planted(21)(i))
    assert suspects_of(bench, state) == [20, 21, 22]
    assert state.result is not None
    assert (state.result.outcome, state.result.exit_code) == ("ambiguous", 3)
    assert state.result.unclassified == 2


def test_it_steps_away_from_a_long_range_that_does_not_build(bench: Bench) -> None:
    broken = set(range(5, 35)) - {9, 10}
    state, asked = bench.run(lambda i: Measurement(status="build", reason="x") if i in broken else planted(37)(i))
    assert suspects_of(bench, state) == [37]
    assert sum(i in broken for i in asked) < 10, "each broken commit doubles the step"


def test_a_folder_of_something_else_is_refused(bench: Bench) -> None:
    def begin(**over: object) -> None:
        bisect_commits(bench.spec.model_copy(update=over), bench.folder.path, lambda line: None)

    bench.folder.path.mkdir()
    (bench.folder.path / "thesis.txt").write_text("mine")
    with pytest.raises(UsageError, match="holds no bisection"):
        begin()
    (bench.folder.path / "thesis.txt").unlink()
    state, _ = bench.run(planted(2))
    with pytest.raises(UsageError, match="holds another bisection"):
        begin(calls=3)
    assert bisect_commits(bench.spec, bench.folder.path, lambda line: None)[0] == state, "it has ended"
    file = bench.folder.path / "state.json"
    file.write_text(file.read_text()[:200])
    with pytest.raises(EvidenceError, match="damaged"):
        begin()


def test_a_bisection_records_no_secret_that_was_given(
    histories: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built: list[BisectSpec] = []

    def measure(spec: BisectSpec, tree: Path, log: Path, *, name_bug: bool, reproduce: str) -> Measurement:
        built.append(spec)
        assert "hunter" not in reproduce
        return Measurement(status="build", reason="no compiler")

    monkeypatch.setattr(bisection, "_measure", measure)
    secret = "GIT_TOKEN=hunter2 make --password hunter2"
    bench = Bench(histories, tmp_path, build=secret)
    for _ in range(2):  # the second resumes
        with pytest.raises(UsageError, match="the good revision"):
            bisect_commits(bench.spec, bench.folder.path, lambda line: None)
    assert {spec.build for spec in built} == {secret}, "what is run has it"
    files = [path for path in bench.folder.path.rglob("*") if path.is_file()]
    assert [path for path in files if path.name == "state.json"]
    assert not [path for path in files if b"hunter" in path.read_bytes()]


SETTINGS: dict[str, Any] = {
    "repo": "/r", "good": "g" * 40, "bad": "b" * 40, "kernel": "m:f", "build": "make all", "pack": "/p", "calls": 6,
    "raises": "bad",
}  # fmt: skip


def test_the_command_repeats_every_setting(tmp_path: Path) -> None:
    settings = {**SETTINGS, "repo": str(tmp_path)}  # the command refuses one that is not there
    assert settings.keys() == BisectSpec.model_fields.keys()
    words = shlex.split(reproduce(BisectSpec(**settings), "c" * 40))
    parsed = load_command("bisect").commands["commits"].make_context("commits", words[3:]).params
    for name, value in {**settings, "good": "g" * 12, "bad": "c" * 12}.items():
        assert type(value)(parsed[name]) == value, name
