"""What is advised looks at the run that it is given for."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from assay import harness, reports
from assay.harness.statement import state
from assay.reports.wording.say import found_in


@pytest.mark.parametrize(
    ("id_", "values"),
    [
        ("envelope-not-counted", {"line": "line 3"}),
        ("envelope-not-answered", {"line": "line 3"}),
        ("nothing-scored", {}),
        ("no-request-admitted", {"roles": ["reference"]}),
    ],
)
def test_servers_that_assay_started_are_not_to_be_started_by_assay(id_: str, values: dict[str, Any]) -> None:
    assert "let assay start" in found_in(state(id_, **values, url=True)).settles
    assert "let assay start" not in (own := found_in(state(id_, **values, url=False)).settles)
    assert "log" in own


@pytest.mark.parametrize(
    ("id_", "values"),
    [
        ("prefix-compared", {"some": False, "prefix": "16+"}),
        ("questions-cached", {"met": 3, "questions": 9, "tokens": 16, "share": 0.5}),
    ],
)
def test_a_prefix_cache_that_is_on_is_not_to_be_kept_on(id_: str, values: dict[str, Any]) -> None:
    assert "keep the prefix cache on" in found_in(state(id_, **values, cache=False)).settles
    assert found_in(state(id_, **values, cache=True)).settles == "ask questions that share a header"


def test_no_text_advises_on_graphs_or_on_flags_that_a_run_may_not_have() -> None:
    sources = [
        path for room in (harness, reports) for path in Path(next(iter(room.__path__))).rglob("*.py") if "engines/" not in str(path)
    ]
    text = "".join(path.read_text(encoding="utf-8") for path in sources)
    assert not re.findall(r"run without CUDA graphs \(|server without graphs|replayed CUDA graphs:", text)
    assert "without --disable-radix-cache" not in text
