"""The chances of a false regression: that docs/coverage.md states all of them, and that its numbers are those of the code."""

from __future__ import annotations

import re
from collections import defaultdict
from fractions import Fraction
from pathlib import Path

from assay.harness.judge.noise_limits import MAX_SWING
from assay.harness.policy import WIDEST_LOGITS_LIMIT, Policy
from assay.harness.stats.noise_bound import FALSE_FLAGS

ROOT = Path(__file__).parents[3]
TEXT = (ROOT / "docs" / "coverage.md").read_text()
PART = re.compile(r"FALSE_FLAGS(?: / (\d+))?")
COMPARISONS = {
    "judge/truth_bounds.py": "layers",
    "localize/bounds.py": "calls",
    "stats/query_bounds.py": "calls",
    "localize/pooled.py": "calls",
}
"""What the parts of `FALSE_FLAGS` in a module are parts of. Queries of layers are judged by `stats/query_bounds.py` as well."""


def rows() -> dict[str, str]:
    table = TEXT.partition("## How often a right candidate is a regression")[2].partition("\n## ")[0]
    cells = [line.split("|")[1:3] for line in table.splitlines() if line.startswith("| ")][1:]
    return {name.strip(): chance.strip() for name, chance in cells}


def percent(name: str) -> float:
    (chance,) = [one for row, one in rows().items() if row.startswith(name)]
    return float(chance.partition(" %")[0])


def test_the_stated_chances_are_those_of_the_code_and_add_up() -> None:
    alpha, flags = 100 * Policy.model_fields["alpha"].default, 100 * FALSE_FLAGS
    assert percent("all suites") == percent("`assay compare`") == alpha
    named = [name for name in rows() if name.startswith("a bug that is named")]
    assert [percent(name) for name in named] == [flags, flags]
    assert percent("`assay check`") == flags
    assert percent("sum for a run") == alpha + 2 * flags
    assert f"{MAX_SWING:g} nats of log-odds and {WIDEST_LOGITS_LIMIT:g} nats of KL" in TEXT


def test_the_parts_of_a_comparison_are_no_more_than_the_whole() -> None:
    parts: dict[str, set[tuple[str, str, Fraction]]] = defaultdict(set)
    for path in (ROOT / "harness").rglob("*.py"):
        name = path.relative_to(ROOT / "harness").as_posix()
        code = re.sub(r'"""[\s\S]*?"""|#.*', "", path.read_text())
        for line in code.splitlines():
            for found in PART.findall(line) if "FALSE_FLAGS /" in line else ():
                assert name in COMPARISONS, f"{name} tests at a part of FALSE_FLAGS: state it in docs/coverage.md"
                variable = re.sub(r"\W", "", line.partition("(")[2])[:24]
                parts[COMPARISONS[name]].add((name, variable, Fraction(1, int(found or 1))))
    assert parts.keys() == {"layers", "calls"}
    calls = {(name, part) for name, _, part in parts["calls"]}
    assert calls == {
        ("localize/bounds.py", Fraction(1, 4)),
        ("stats/query_bounds.py", Fraction(1, 4)),
        ("localize/pooled.py", Fraction(1, 4)),
    }
    assert sum(1 for name, _, _ in parts["calls"] if name == "localize/pooled.py") == 2, "scaled outputs, no quantisation"
    assert {part for _, _, part in parts["layers"]} <= {Fraction(1, 2), Fraction(1, 4), Fraction(1)}
