"""Two JUnit files -> the tests that changed their outcome."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from assay.harness.ingest.results.comparison import OutcomeChange, requirement
from assay.harness.ingest.results.result_set import ResultSet
from assay.harness.text import counted, one_line
from assay.harness.verdict import Check, Verdict

_BAD = ("failed", "error")


def compare_outcomes(
    a: Sequence[ResultSet], b: Sequence[ResultSet]
) -> tuple[Verdict, str, tuple[OutcomeChange, ...], list[Check]]:
    """Compare outcomes: the verdict, why, the tests with another outcome, and the checks of a pass.

    - *regression*: a test that passed in A fails in B. A single flaky test is enough: a file cannot show that it is one.
    - *pass*: none does, every test of A that passed ran and passed in B, and no other test fails in B.
    """
    before, after = _outcomes(a), _outcomes(b)
    repeated = sorted(name for name, number in (before[1] + after[1]).items() if number)
    both = [(name, outcome, after[0][name]) for name, outcome in before[0].items() if name in after[0]]
    changed = [OutcomeChange(test=name, a=x, b=y) for name, x, y in both if x != y]
    broken = [one for one in changed if one.a == "passed" and one.b in _BAD]
    mended = [one for one in changed if one.a in _BAD and one.b == "passed"]
    gone = [
        name
        for name, outcome in before[0].items()
        if outcome == "passed" and after[0].get(name, "skipped") == "skipped"
    ]
    new = [name for name, outcome in after[0].items() if outcome in _BAD and name not in before[0]]
    hidden = [f"{one.source} states {one.failed:,} more than it lists" for one in (*a, *b) if one.failed]
    ran = sum(outcome == "passed" for outcome in before[0].values())
    failing = sum(outcome in _BAD for outcome in after[0].values())
    checks = [
        _needs("all-ran", "every test that passed in A ran in B", _named(gone, "did not run in B"), f"{ran:,} tests"),
        _needs("no-test-twice", "every test is there once", _named(repeated, "are there more than once"), "once each"),
        _needs("none-new", "no test that fails in B is new", _named(new, "fail in B and are not in A"), "none is"),
        _needs("all-listed", "every test that failed is listed", "; ".join(hidden), "it is"),
        _needs("anything-passed", "a test passed in A", "" if ran else "none did, so none could fail", f"{ran:,} did"),
    ]
    verdict: Verdict = "regression" if broken else "pass"
    why = (
        f"{len(broken):,} of {counted(ran, 'test')} that passed in A {'fails' if len(broken) == 1 else 'fail'} in B"
        if broken
        else f"No test that passed in A fails in B ({ran:,} did)"
    )
    why += f"; {len(mended):,} that failed in A {'passes' if len(mended) == 1 else 'pass'} in B" if mended else ""
    still = failing - len(broken) - len(new)
    why += f"; {still:,} {'fails' if still == 1 else 'fail'} in both" if still else ""
    return verdict, f"{why}.", (*broken, *(one for one in changed if one not in broken)), checks


def _outcomes(sets: Sequence[ResultSet]) -> tuple[dict[str, str], Counter[str]]:
    """Return the outcome of each test that is there once, and count the repeats of the others."""
    counted = Counter(item.key for one in sets for item in one.items)
    repeated = Counter({name: number - 1 for name, number in counted.items() if number > 1})
    return {item.key: item.answer for one in sets for item in one.items if not repeated[item.key]}, repeated


def _named(names: Sequence[str], what: str) -> str:
    if not names:
        return ""
    return (
        f"{len(names):,} {what}: {', '.join(one_line(name, 80) for name in names[:3])}{', …' if len(names) > 3 else ''}"
    )


def _needs(id: str, title: str, wrong: str, right: str) -> Check:
    return requirement(id, title, wrong, right, "run the same tests, all of them")
