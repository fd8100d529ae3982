"""The flow of a bisection, with probes whose measurements are given."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType

import pytest

from assay.harness.bisect.commits.bisect_session import SKIPS_BEFORE_CANARY, Asked, Session, new_state
from assay.harness.bisect.commits.measure import BrokenEnvironment
from assay.harness.bisect.commits.repo import Repository
from assay.harness.bisect.commits.state import BisectFolder, BisectSpec, BisectState, CallErrors, Measurement
from assay.harness.errors import UsageError


def row(error: float, number: int = 0, prefix: str = ">= 16") -> CallErrors:
    return CallErrors(
        number=number, layer=number, call=f"call {number}", condition={"prefix": prefix}, own=(error,), bound=1.0, rounding=1.0
    )


def measured(*errors: float) -> Measurement:
    return Measurement(status="measured", rows=tuple(row(error, i) for i, error in enumerate(errors)), seconds=0.1)


class Given:
    """A prober whose measurements are given by the number of the commit; probes of a round end in a random order."""

    def __init__(
        self, commits: tuple[str, ...], answer: Callable[[int], Measurement], stop_after: int = 10_000, slots: int = 1
    ) -> None:
        self._place = {commit: i for i, commit in enumerate(commits)}
        self._answer, self._left, self.slots = answer, stop_after, slots
        self._random = random.Random(0)
        self.asked: list[int] = []
        self.rounds: list[list[str]] = []

    def __call__(self, asked: Sequence[Asked]) -> Iterator[tuple[Asked, Measurement]]:
        assert len(asked) <= self.slots
        self.rounds.append([one.purpose for one in asked])
        for one in self._random.sample(asked, len(asked)):
            if not self._left:
                raise KeyboardInterrupt
            self._left -= 1
            self.asked.append(self._place[one.commit])
            yield one, self._answer(self._place[one.commit])


class Bench:
    """A straight history of 40 commits, and bisections of it."""

    def __init__(self, histories: ModuleType, path: Path, **over: object) -> None:
        made = histories.make(path / "repo", histories.straight(40), lambda i: f"N = {i}\n")
        self.repository, self.commits = Repository(made.path), made.commits
        ends = {"repo": str(made.path), "good": made.commits[0], "bad": made.commits[-1], "kernel": "attn:f"}
        self.spec = BisectSpec.model_validate(ends | {"scan": 0} | over)
        self.folder = BisectFolder(path / "out")

    def run(self, answer: Callable[[int], Measurement], stop_after: int = 10_000, slots: int = 1) -> tuple[BisectState, Given]:
        given = Given(self.commits, answer, stop_after, slots)
        with self.folder.locked():
            there = self.folder.state_file.exists()
            state = self.folder.read() if there else new_state(self.spec, self.repository)
            return Session(self.folder, state, given, self.repository, lambda state, doing: None).run(), given


@pytest.fixture
def bench(histories: ModuleType, tmp_path: Path) -> Bench:
    return Bench(histories, tmp_path)


def planted(culprit: int) -> Callable[[int], Measurement]:
    return lambda i: measured(0.1, 5.0 if i >= culprit else 0.2)


def test_it_ends_with_the_commit_and_what_changed_there(bench: Bench) -> None:
    state, given = bench.run(planted(17))
    result = state.result
    assert result is not None
    assert result.suspects == (bench.commits[17],)
    assert (result.outcome, result.exit_code) == ("found", 0)
    assert result.confidence >= 0.95
    assert given.asked[:2] == [0, 39]
    assert result.commit is not None
    assert result.commit.subject == "Change 17"
    assert "attn.py" in result.commit.diffstat
    assert {change.axis: change.new for change in result.changes}["layer"] == ("1",)
    assert f"its parent {bench.commits[16][:12]} was good in" in result.checked
    assert "monotone as far as" in result.notes[0]
    assert state == bench.folder.read(), "the whole state is on disk"
    assert len(state.probes) == len(given.asked)


def test_what_was_read_is_compared_with_the_commit_before_if_that_was_wrong_too(histories: ModuleType, tmp_path: Path) -> None:
    def answer(i: int) -> Measurement:
        """Wrong all along, in the way of A, and from commit 17 on five times as much, in the way of B."""
        clauses = ("it does A", "it does B") if i >= 17 else ("it does A",)
        return measured(10.0 if i >= 17 else 2.0).model_copy(update={"operator": clauses})

    bench = Bench(histories, tmp_path, against="good")
    state, given = bench.run(answer)
    assert state.result is not None
    assert state.result.suspects == (bench.commits[17],)
    assert given.asked[-2:] == [17, 16], "both are named"
    note = "before this commit, the kernel was wrong too: it does A. New at the commit: it does B"
    assert note in state.result.notes


def test_a_commit_before_that_was_right_is_not_read(bench: Bench) -> None:
    state, given = bench.run(lambda i: planted(17)(i).model_copy(update={"operator": ("it does A",)}))
    assert state.result is not None
    assert given.asked[-1] == 17
    assert not any("before this commit" in note for note in state.result.notes)


def test_wrong_ends_stop_a_bisection_before_the_search(bench: Bench) -> None:
    with pytest.raises(UsageError, match=r"the good revision .* is not good: 0 probes good and 7 bad"):
        bench.run(lambda i: measured(5.0))
    with pytest.raises(UsageError, match=r"the bad revision .* is not bad: 7 probes good and 0 bad"):
        bench.run(lambda i: measured(0.0))
    with pytest.raises(UsageError, match=r"the good revision .* cannot be probed: build: no compiler"):
        bench.run(lambda i: Measurement(status="build", reason="no compiler"))
    state, _ = bench.run(planted(3))
    assert state.result is not None, "once it is fixed, the same command resumes"
    assert state.result.suspects == (bench.commits[3],)


@pytest.mark.parametrize("stop_after", [0, 1, 2, 6, 10])
def test_a_stopped_bisection_is_resumed(bench: Bench, stop_after: int) -> None:
    with pytest.raises(KeyboardInterrupt):
        bench.run(planted(29), stop_after)
    kept = len(bench.folder.read().probes) if bench.folder.state_file.exists() else 0
    assert kept == stop_after
    state, given = bench.run(planted(29))
    assert state.result is not None
    assert state.result.suspects == (bench.commits[29],)
    assert len(state.probes) == kept + len(given.asked), "no probe is repeated"
    again, given = bench.run(planted(29))
    assert (again, given.asked) == (state, [])


def test_several_at_once_take_few_rounds_and_leave_the_same_answer(bench: Bench) -> None:
    state, given = bench.run(planted(17), slots=7)
    assert state.result is not None
    assert state.result.suspects == (bench.commits[17],)
    assert given.rounds[0] == ["good-end", "bad-end", *["search"] * 5], "the ends, and beside them the search as if they held"
    assert len(given.rounds) <= 4, "reading the culprit is the last one"
    assert sorted(probe.number for probe in state.probes) == list(range(1, len(given.asked) + 1))
    assert state.probes[0].purpose in ("good-end", "bad-end")
    assert {p.purpose for p in state.probes[:2]} == {"good-end", "bad-end"}, "what rests on them is recorded after them"
    assert all(bench.folder.measurement(p.number) == planted(17)(bench.commits.index(p.commit)) for p in state.probes)


@pytest.mark.parametrize("stop_after", [0, 1, 3, 8, 10, 14])
def test_probes_in_flight_are_all_that_a_stop_costs(bench: Bench, stop_after: int) -> None:
    with pytest.raises(KeyboardInterrupt):
        bench.run(planted(29), stop_after, slots=7)
    before = bench.folder.read().probes if bench.folder.state_file.exists() else ()
    # Of the first round, what ended before both ends had is not recorded.
    assert len(before) == stop_after if stop_after >= 7 else len(before) <= stop_after
    state, given = bench.run(planted(29), slots=3)
    assert state.result is not None
    assert state.result.suspects == (bench.commits[29],)
    assert state.probes[: len(before)] == before, "no probe is repeated"
    numbers = [probe.number for probe in state.probes]
    assert len(set(numbers)) == len(numbers) == len(before) + len(given.asked)


def test_wrong_ends_leave_nothing_of_the_search_beside_them(bench: Bench) -> None:
    with pytest.raises(UsageError, match=r"revision .* cannot be probed: build: no compiler"):
        bench.run(lambda i: Measurement(status="build", reason="no compiler"), slots=7)
    assert not bench.folder.state_file.exists(), "commits that were probed beside them are not called broken"
    with pytest.raises(UsageError, match=r"the bad revision .* is not bad: \d+ probes good and 0 bad"):
        bench.run(lambda i: measured(0.0), slots=7)
    state, _ = bench.run(planted(3), slots=7)
    assert state.result is not None
    assert state.result.suspects == (bench.commits[3],)


def test_skips_around_the_culprit_leave_a_range(bench: Bench) -> None:
    def answer(i: int) -> Measurement:
        return Measurement(status="import", reason="no") if i in (20, 21) else planted(21)(i)

    state, _ = bench.run(answer)
    assert state.result is not None
    assert (state.result.outcome, state.result.exit_code) == ("ambiguous", 3)
    assert state.result.suspects == bench.commits[20:23]
    assert "2 commits could not be probed" in state.result.notes


@pytest.mark.parametrize(("sound", "slots"), [(8, 1), (7, 7)])
def test_a_broken_environment_is_no_commits_fault(bench: Bench, sound: int, slots: int) -> None:
    count = 0

    def answer(i: int) -> Measurement:
        nonlocal count
        count += 1
        return planted(29)(i) if count <= sound else Measurement(status="build", reason="disk full")

    with pytest.raises(BrokenEnvironment, match="could be probed before and cannot be now: build: disk full"):
        bench.run(answer, slots=slots)
    assert len(bench.folder.read().probes) == sound, "later failures are forgotten"
    state, _ = bench.run(planted(29))
    assert state.result is not None
    assert state.result.suspects == (bench.commits[29],)


def test_many_broken_commits_are_not_a_broken_environment(bench: Bench) -> None:
    broken = set(range(5, 35)) - {9, 10}
    state, _ = bench.run(lambda i: Measurement(status="build", reason="x") if i in broken else planted(10)(i))
    assert state.result is not None
    assert bench.commits[10] in state.result.suspects
    assert sum(p.outcome == "skip" for p in state.probes) >= SKIPS_BEFORE_CANARY
    assert any(p.purpose == "environment" and p.outcome == "good" for p in state.probes)


def test_commits_that_build_only_once_do_not_loop_forever(bench: Bench) -> None:
    seen: list[int] = []

    def answer(i: int) -> Measurement:
        seen.append(i)
        if len(seen) > 200:
            raise AssertionError("it never ends")
        once = i in (0, 39) or seen.count(i) == 1
        return planted(17)(i) if once else Measurement(status="build", reason="no room")

    state, _ = bench.run(answer)
    assert state.result is not None
    assert bench.commits[17] in state.result.suspects
    assert all(seen.count(i) <= 4 for i in set(seen) - {0, 39})


def test_two_regressions_and_a_fix_are_reported(histories: ModuleType, tmp_path: Path) -> None:
    bench = Bench(histories, tmp_path, scan=8)
    state, _ = bench.run(lambda i: measured(5.0 if 6 <= i < 14 else 0.1, 5.0 if i >= 30 else 0.1))
    assert state.result is not None
    assert state.result.suspects in ((bench.commits[6],), (bench.commits[30],))
    assert any("not monotone" in note for note in state.result.notes)
    assert sum(p.purpose == "scan" for p in state.probes) == 8


def test_a_second_regression_after_the_named_one_is_reported(bench: Bench) -> None:
    state, _ = bench.run(lambda i: measured(5.0 if i >= 9 else 0.1, 5.0 if i >= 33 else 0.1))
    assert state.result is not None
    assert state.result.suspects == (bench.commits[9],)
    assert any("layer 1" in note and "there is another regression after it" in note for note in state.result.notes)


def test_a_folder_is_bisected_by_one_process(bench: Bench) -> None:
    with bench.folder.locked(), pytest.raises(UsageError, match="another process"), BisectFolder(bench.folder.path).locked():
        pass


def test_a_damaged_state_is_reported(bench: Bench) -> None:
    bench.run(planted(2))
    text = bench.folder.state_file.read_text()
    bench.folder.state_file.write_text(text[: len(text) // 2])
    with pytest.raises(Exception, match="damaged"):
        bench.folder.read()
    bench.folder.state_file.write_text(text.replace("assay.bisect-commits/3", "assay.bisect-commits/0"))
    with pytest.raises(UsageError, match="schema"):
        bench.folder.read()
    with pytest.raises(UsageError, match="no bisection"):
        BisectFolder(bench.folder.path / "nowhere").read()
