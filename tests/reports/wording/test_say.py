"""Every statement and every metric has the function that says it, with the same values, and every function is used."""

from __future__ import annotations

import ast
import inspect
import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from assay import harness, reports
from assay.harness.judge.judgement import Metric, measure
from assay.harness.judge.report import EnvelopeResult
from assay.harness.statement import WORDS, Statement, state
from assay.harness.verdict import Check, Requirement
from assay.reports.wording.envelope import envelope_lines
from assay.reports.wording.requirements import said_check
from assay.reports.wording.say import found_in, measured_of, say, sayings
from assay.reports.wording.written import with_words

HARNESS = Path(next(iter(harness.__path__)))
GOLDEN = Path(__file__).parents[2] / "data" / "golden" / "words.jsonl"
OF_A_METRIC = {"part", "low", "high", "bound", "policy"}


def made() -> Iterator[tuple[str, str, set[str], bool]]:
    """Yield where a statement or a metric is made, its id, the names of its values, and whether they are all."""
    for path in sorted(HARNESS.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in MAKERS:
                first = node.args[0]
                names = {keyword.arg for keyword in node.keywords if keyword.arg} - MAKERS[node.func.id]
                whole = all(keyword.arg for keyword in node.keywords) and node.func.id in ("state", "measure")
                ids = [each.value for each in ast.walk(first) if isinstance(each, ast.Constant) and isinstance(each.value, str)]
                for id_ in ids:
                    yield f"{path.relative_to(HARNESS)}:{node.lineno}", id_, names, whole


MAKERS: dict[str, set[str]] = {"state": set(), "measure": OF_A_METRIC, "state_lengths": set()}


def test_every_statement_is_said_with_its_values() -> None:
    wrong = []
    for where, id_, names, whole in made():
        if id_ not in sayings():
            wrong.append(f"{where}: nothing says {id_}")
            continue
        parameters = inspect.signature(sayings()[id_]).parameters.values()
        taken = {each.name for each in parameters if each.kind is not each.VAR_KEYWORD} - {"metric"}
        needed = {each.name for each in parameters if each.kind is not each.VAR_KEYWORD and each.default is each.empty} - {"metric"}
        more = any(each.kind is each.VAR_KEYWORD for each in parameters)
        if (names - taken and not more) or (whole and needed - names):
            wrong.append(f"{where}: {id_} has {sorted(names)}, and its words take {sorted(taken)}")
    assert not wrong, "\n".join(wrong)


def test_all_words_are_said_of_something() -> None:
    text = "".join(path.read_text() for path in HARNESS.rglob("*.py"))
    assert [id_ for id_ in sayings() if f'"{id_}"' not in text] == []


def test_words_are_what_they_were(tmp_path: Path) -> None:
    """Examples of statements and metrics, with what they are said to be, and of checks what would resolve them."""
    lines, made = GOLDEN.read_text(encoding="utf-8").splitlines(), tmp_path / GOLDEN.name
    now = [json.dumps(given | {"said": said(given)}, ensure_ascii=False) for given in map(json.loads, lines)]
    made.write_text("\n".join(now) + "\n", encoding="utf-8")
    assert now == lines, f"look at what is different, and if it is right, take it over: cp {made} {GOLDEN}"


def said(given: dict[str, Any]) -> list[str]:
    if "envelope" in given:
        return envelope_lines(EnvelopeResult.model_validate(given["envelope"]))
    if "metric" in given:
        return list(measured_of(Metric.model_validate(given["metric"])))
    return list(found_in(Statement.model_validate(given["statement"])))


def test_words_are_beside_the_numbers_in_json_and_do_not_count_when_it_is_read() -> None:
    inner = state("all-answered", asked=8, answered=math.inf)
    check = Requirement("all-answered").check("missing", state("nested", inner=inner, counts=(1, math.nan)))
    written = json.loads(check.model_dump_json(context={WORDS: with_words}))
    assert {"title", "found", "settles"} <= set(written)
    assert written["outcome"]["values"]["inner"] == {"id": "all-answered", "values": {"asked": 8, "answered": {"float": "inf"}}}
    read = Check.model_validate(written)
    assert read.outcome.values["inner"] == inner
    assert math.isnan(read.outcome.values["counts"][1])
    assert "title" not in read.model_dump()


def test_what_a_later_assay_states_is_shown_as_it_is() -> None:
    assert say(state("warp-stall", cycles=3, unit="SM"), state("short")) == "warp-stall: cycles 3, unit SM short"
    assert say(state("all-answered", answered=7, asked=8, late=1)) == "all-answered: answered 7, asked 8, late 1"
    assert measured_of(measure("occupancy", 0.5, part="extend")).title == "occupancy-extend"
    assert said_check(Requirement("new").of("extend").check("failed", state("found"))).title == "it is not shown that new: extend"


@pytest.mark.parametrize("value", ["\ud800", ["\ud800"]])
def test_a_statement_can_always_be_written(value: object) -> None:
    Statement.model_validate_json(state("text", value=value).model_dump_json())


def test_no_text_advises_on_graphs_or_on_flags_that_a_run_may_not_have() -> None:
    sources = [
        path for room in (harness, reports) for path in Path(next(iter(room.__path__))).rglob("*.py") if "engines/" not in str(path)
    ]
    text = "".join(path.read_text(encoding="utf-8") for path in sources)
    assert not re.findall(r"run without CUDA graphs \(|server without graphs|replayed CUDA graphs:", text)
    assert "without --disable-radix-cache" not in text
