from __future__ import annotations

import io
import math
from pathlib import Path

import pytest
from rich.console import Console

from assay.harness.bisect.commits.state import BisectResult, BisectSpec, BisectState, CommitProbe, Measurement, RangeCommit
from assay.reports.commit_bisection import ProgressView, _progress, bisection_document, probe_line
from assay.reports.terminal import render

HASHES = [f"{i:02x}" * 20 for i in range(9)]
PROBES = (
    CommitProbe(number=1, commit=HASHES[0], purpose="good-end", outcome="good", worst=0.25, seconds=0.5),
    CommitProbe(number=2, commit=HASHES[8], purpose="bad-end", outcome="bad", worst=math.inf, seconds=0.5),
    CommitProbe(number=3, commit=HASHES[4], purpose="search", outcome="skip", reason="build: [red]no tile[/]", seconds=0.1),
    CommitProbe(number=4, commit=HASHES[5], purpose="search", outcome="bad", worst=70.0, seconds=0.5),
)


def state(probes: int, result: BisectResult | None = None) -> BisectState:
    spec = BisectSpec(repo="/r", good=HASHES[0], bad=HASHES[8], kernel="attn:forward")
    history = tuple(RangeCommit(commit=c, subject=f"Change [{i}]", parents=(i - 1,) if i else ()) for i, c in enumerate(HASHES[1:]))
    return BisectState(spec=spec, command="assay", history=history, probes=PROBES[:probes], result=result)


def console(terminal: bool) -> Console:
    return Console(file=io.StringIO(), width=160, force_terminal=terminal)


def written(made: Console) -> str:
    assert isinstance(made.file, io.StringIO)
    return made.file.getvalue()


def test_without_a_terminal_each_probe_is_a_line() -> None:
    made = console(terminal=False)
    with ProgressView(made, Path("runs/b")) as board:
        for count in (0, 1, 1, 2, 3, 4):
            board(state(count), "search: next")
    lines = written(made).splitlines()
    assert lines[0] == "Bisecting 8 commits in runs/b; 0 probes are already done."
    assert len(lines) == 1 + 4
    assert f"2: bad end {HASHES[8][:12]} bad not finite (0.5 s)" in lines[2]
    assert "skip build: [red]no tile[/]" in lines[3], "the output of a build is not markup"


def test_a_resumed_bisection_does_not_repeat_its_last_probe() -> None:
    made = console(terminal=False)
    with ProgressView(made, Path("runs/b")) as board:
        for count in (2, 3):
            board(state(count), "search: next")
    lines = written(made).splitlines()
    assert lines[0] == "Bisecting 8 commits in runs/b; 2 probes are already done."
    assert [line.split("] ")[1].split()[0] for line in lines[1:]] == ["3:"]


def test_on_a_terminal_the_table_is_live() -> None:
    made = console(terminal=True)
    with ProgressView(made, Path("runs/b")) as board:
        board(state(4), "search: next")
    text = written(made)
    assert "Change [5]" not in text.replace("Change [4]", ""), "the subject of the probed commit, and of no other"
    assert "Change [4]" in text
    assert "search: next" in text


def test_progress_says_how_many_commits_are_left() -> None:
    assert "checking the ends of a range of 8 commits" in _progress(state(1))
    assert "2 probes, 0 commits skipped; 8 of 8 commits left" in _progress(state(2))
    assert "4 probes, 1 commits skipped; 5 of 8 commits left" in _progress(state(4))
    made = console(terminal=False)
    render(bisection_document(state(4)), made)
    assert "5 of 8 commits left" in written(made)


@pytest.mark.parametrize(
    ("outcome", "says"),
    [("ambiguous", "The culprit is one of 2 commits"), ("flaky", "No commit could be named: outcomes are too flaky")],
)
def test_without_a_culprit_the_suspects_are_listed(outcome: str, says: str) -> None:
    result = BisectResult.model_validate(
        {
            "outcome": outcome,
            "suspects": HASHES[4:6],
            "confidence": 0.99,
            "misclassification": (0.1, 0.2),
            "repeated": 4,
            "outvoted": 1,
        }
    )
    document, made = bisection_document(state(4, result)), console(terminal=False)
    render(document, made)
    lines = written(made).splitlines()
    assert says in document.conclusion
    assert document.code == result.exit_code
    assert f"  {HASHES[4][:12]} Change [3]" in lines
    assert "4 probes (1 good end, 1 bad end, 2 search; 1 of them skipped)" in lines[-1]
    assert "4, 1 of them outvoted; estimated misclassification: 10.0 % of good commits, 20.0 % of bad ones" in lines[-1]


def test_the_outcome_of_a_single_probe_is_a_line() -> None:
    measured, broken = Measurement(status="measured", origin="attn.py"), Measurement(status="build")
    [good, bad, skip, _] = PROBES
    assert probe_line(good.model_copy(update={"where": "call 0"}), measured) == (
        "good: worst own error 0.25 times its bound, call 0 (attn.py)"
    )
    assert probe_line(bad.model_copy(update={"where": "call 0"}), measured) == ("bad: worst own error not finite, call 0 (attn.py)")
    assert probe_line(skip, broken) == "skip: build: [red]no tile[/] (not imported)"
