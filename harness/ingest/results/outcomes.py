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
    (before, twice), (after, again) = _outcomes(a), _outcomes(b)
    both = [(name, outcome, after[name]) for name, outcome in before.items() if name in after]
    changed = [OutcomeChange(test=name, a=x, b=y) for name, x, y in both if x != y]
    changed.sort(key=lambda change: not _broke(change))
    broken = sum(map(_broke, changed))
    repaired = sum(change.a in _BAD and change.b == "passed" for change in changed)
    passed = [name for name, outcome in before.items() if outcome == "passed"]
    gone = [name for name in passed if after.get(name, "skipped") == "skipped"]
    failing = [name for name, outcome in after.items() if outcome in _BAD]
    new = [name for name in failing if name not in before]
    hidden = [
        f"{outcomes.source} states {outcomes.failed:,} more than it lists" for outcomes in (*a, *b) if outcomes.failed
    ]
    ran = f"{len(passed):,}"
    none_passed = "" if passed else "none did, so none could fail"
    checks = [
        _needs("all-ran", "every test that passed in A ran in B", _named(gone, "did not run in B"), f"{ran} tests"),
        _needs("no-test-twice", "every test is there once", _named(sorted(twice | again), "are there more than once"), "once each"),
        _needs("none-new", "no test that fails in B is new", _named(new, "fail in B and are not in A"), "none is"),
        _needs("all-listed", "every test that failed is listed", "; ".join(hidden), "it is"),
        _needs("anything-passed", "a test passed in A", none_passed, f"{ran} did"),
    ]  # fmt: skip
    verdict: Verdict = "regression" if broken else "pass"
    why = f"No test that passed in A fails in B ({ran} did)"
    if broken:
        why = f"{broken:,} of {counted(len(passed), 'test')} that passed in A {_verb(broken, 'fail')} in B"
    why += f"; {repaired:,} that failed in A {_verb(repaired, 'pass')} in B" if repaired else ""
    still = len(failing) - broken - len(new)
    why += f"; {still:,} {_verb(still, 'fail')} in both" if still else ""
    return verdict, f"{why}.", tuple(changed), checks


def _broke(change: OutcomeChange) -> bool:
    return change.a == "passed" and change.b in _BAD


def _verb(count: int, verb: str) -> str:
    return verb if count != 1 else f"{verb}es" if verb.endswith("s") else f"{verb}s"


def _outcomes(sets: Sequence[ResultSet]) -> tuple[dict[str, str], set[str]]:
    """Return the outcome of each test that is there once, and the names of the others."""
    counts = Counter(item.key for result_set in sets for item in result_set.items)
    repeated = {name for name, number in counts.items() if number > 1}
    return {item.key: item.answer for source in sets for item in source.items if item.key not in repeated}, repeated


def _named(names: Sequence[str], what: str) -> str:
    if not names:
        return ""
    return (
        f"{len(names):,} {what}: {', '.join(one_line(name, 80) for name in names[:3])}{', …' if len(names) > 3 else ''}"
    )


def _needs(id: str, title: str, wrong: str, right: str) -> Check:
    return requirement(id, title, wrong, right, "run the same tests, all of them")
