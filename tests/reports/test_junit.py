from __future__ import annotations

import xml.etree.ElementTree as ET
from types import ModuleType

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from assay.harness.judge.report import Report
from assay.harness.statement import Statement, state
from assay.harness.verdict import Check, CheckStatus, Requirement
from assay.reports import junit
from assay.reports.document import Document
from assay.reports.run_report import run_document
from assay.reports.wording.say import sayings
from assay.reports.wording.verdict import headline


def to_junit(report: Report) -> str:
    return junit.to_junit(run_document(report))


def _case(text: str, name: str) -> ET.Element:
    [case] = [case for case in ET.fromstring(text).iter("testcase") if case.get("name") == name]
    return case


def _outcomes(text: str) -> list[str]:
    kinds = ("failure", "error", "skipped")
    found = [[child.tag for child in case if child.tag in kinds] for case in ET.fromstring(text).iter("testcase")]
    assert all(len(kinds) <= 1 for kinds in found)
    return [kinds[0] if kinds else "passed" for kinds in found]


@pytest.mark.parametrize(
    ("verdict", "outcome"), [("pass", None), ("regression", "failure"), ("inconclusive", "error"), ("error", "error")]
)
def test_only_a_pass_is_green(examples: ModuleType, verdict: str, outcome: str | None) -> None:
    report = examples.BY_VERDICT[verdict]()
    text = to_junit(report)
    case = next(case for case in ET.fromstring(text).iter("testcase") if case.get("name") == "verdict")
    assert [child.tag for child in case if child.tag != "system-out"] == ([outcome] if outcome else [])
    if outcome:
        result = case.find(outcome)
        assert result is not None
        assert result.get("type") == verdict
        assert result.get("message") == headline(report)
        assert report.reproduce in (result.text or "")
    assert ("failure" in _outcomes(text)) == (verdict == "regression")
    assert ({"failure", "error"} & set(_outcomes(text)) == set()) == (verdict == "pass")


@pytest.mark.parametrize(("code", "outcome"), [(0, "passed"), (1, "failure"), (3, "error")])
def test_a_document_without_suites_is_as_green_as_its_exit_code(code: int, outcome: str) -> None:
    document = Document(command="runs", title="", verdict="regression", headline="The newest", body=[], exit_code=code)
    assert _outcomes(junit.to_junit(document)) == [outcome]


@pytest.mark.parametrize("verdict", ["regression", "inconclusive", "error"])
def test_a_run_with_nothing_in_it_is_not_green(examples: ModuleType, verdict: str) -> None:
    empty = examples.BY_VERDICT[verdict]().model_copy(update={"suites": (), "checks": (), "findings": ()})
    assert _outcomes(to_junit(empty)) == ["failure" if verdict == "regression" else "error"]


@pytest.mark.parametrize(
    ("status", "outcome"), [("ok", "passed"), ("failed", "failure"), ("missing", "error"), ("not checked", "skipped")]
)
def test_checks(examples: ModuleType, status: CheckStatus, outcome: str) -> None:
    check = Requirement("all-answered").check(status, state("all-answered", answered=7, asked=8))
    text = to_junit(examples.passing().model_copy(update={"suites": (), "checks": (check,)}))
    assert _outcomes(text) == ["passed", outcome]
    case = ET.tostring(_case(text, "all-answered"), encoding="unicode")
    assert "question: 7 of 8" in case or "servers: 7 of 8" in case
    assert ("repeat the command" in case) == (status != "ok")


def test_hostile_text_is_legal_xml_and_stays_text(examples: ModuleType) -> None:
    text = to_junit(examples.hostile())
    root = ET.fromstring(text.encode("utf-8"))
    assert {element.tag for element in root.iter()} <= {
        "testsuites", "testsuite", "testcase", "properties", "property", "failure", "error", "skipped", "system-out",
    }  # fmt: skip
    shown = "".join(root.itertext())
    assert "<img src=x onerror=" in shown
    assert "␛[2J" in shown
    assert len(text) < 200_000


@settings(max_examples=25, deadline=None)
@given(st.text(st.characters(codec=None, exclude_categories=()), max_size=40))
def test_any_text_is_legal_xml(examples: ModuleType, text: str) -> None:
    assume(text not in sayings())  # what has words needs its values
    report = examples.regression()
    said = Statement.model_construct(id=text, values={})
    check = Check.model_construct(id=text, requirement=text, part=text, sides=(text, text), status="failed", outcome=said)
    suite = report.suites[0].model_copy(update={"id": text, "asked": text, "why": (said,)})
    written = to_junit(report.model_copy(update={"checks": (check,), "suites": (suite,)}))
    ET.fromstring(written.encode("utf-8"))
