from __future__ import annotations

from types import ModuleType

from assay.harness.ingest.result import CitedFinding
from assay.harness.verdict import Finding
from assay.reports.terminal import _finding_text, finding_lines


def test_operator_and_picture_come_before_the_evidence(examples: ModuleType) -> None:
    [found] = examples.regression().findings
    lines = finding_lines(found)
    assert lines[0].startswith("serious: multiple choice, >= 16 cached tokens: The candidate")
    assert lines[1] == "  observed: query i does not see keys j > i, only where a prefix is cached"
    assert lines[2].split() == ["expected", "read", "difference"]
    assert lines[4] == "  2     ###...    #.....    #oo..."
    assert lines[-3:-1] == [f"  - {line}" for line in found.evidence]
    assert lines[-1] == "  explained by: assay explain accuracy"


def test_a_finding_without_them_is_as_short_as_it_was(examples: ModuleType) -> None:
    [found] = examples.regression().findings
    lines = finding_lines(found.model_copy(update={"operator": "", "picture": None}))
    assert len(lines) == 2 + len(found.evidence)


def test_a_narrow_terminal_gets_a_narrow_picture(examples: ModuleType) -> None:
    [found] = examples.regression().findings
    lines = _finding_text(found, 24).plain.splitlines()
    assert lines[2].strip() == "difference"
    assert max(map(len, lines[2:-3])) <= 24


def test_a_sentence_that_is_the_diagnosis_is_not_repeated() -> None:
    said = Finding(
        id="operator", title="another operator", severity="serious", where="extend", diagnosis="query i sees key p + 2",
        evidence=(), reproduce="again", operator="query i sees key p + 2",
    )  # fmt: skip
    assert finding_lines(said) == ["serious: extend: query i sees key p + 2.", "  explained by: assay explain operator"]
    cited = CitedFinding(**{name: getattr(said, name) for name in Finding.model_fields})
    assert finding_lines(cited) == ["serious: extend: query i sees key p + 2."]  # it has no page
