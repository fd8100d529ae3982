"""Reads assay's own results: a run's folder, which has the answers, or a ``report.json``, which has only the verdict."""

from __future__ import annotations

from pathlib import Path

from assay.harness.config import recorded_spec
from assay.harness.evidence.folder import RunFolder
from assay.harness.evidence.records import Answer, Item
from assay.harness.ingest.asked import Asked
from assay.harness.ingest.result import CitedFinding, Fact, FileDocument
from assay.harness.ingest.result_set import ReadResults, ResultItem, ResultSet, results_reader
from assay.harness.ingest.source_file import SourceFile
from assay.harness.judge.build import build
from assay.harness.judge.report import Report, read_report
from assay.harness.verdict import cause_of

_SUITE = "accuracy"
_REPORT = "report.json"


def _recognises(source: SourceFile) -> bool:
    """Recognise a folder with a manifest and items, a folder with a report, or JSON with a report's schema."""
    if source.path.is_dir():
        report = source.path / _REPORT
        return _is_run(source.path) or (report.is_file() and _recognises(SourceFile.of(report)))
    return source.path.suffix == ".json" and '"assay.report/' in source.head_text[:4_000]


def _is_run(folder: Path) -> bool:
    return all((folder / name).is_file() for name in ("manifest.json", "items.jsonl"))


def _with_verdict(source: SourceFile, document: FileDocument) -> FileDocument:
    report = report_of(source)
    basis = ", ".join(basis_of(report))
    said = f"{report.verdict}: {basis}" if basis else report.verdict
    verdict = Fact(id="verdict", title=f"verdict of {report.run_id}", text=said)
    findings = document.findings
    if report.verdict != "pass":
        own = CitedFinding(
            id="run-verdict", title="The run did not pass", severity="serious" if report.verdict == "regression" else "warning",
            where=report.run_id, diagnosis=f"The run's own verdict is {said}.", reproduce="",
        )  # fmt: skip
        findings = (own, *findings)
    return document.model_copy(update={"facts": (verdict, *document.facts), "findings": findings})


def basis_of(report: Report) -> list[str]:
    """List the basis of a run's verdict: the title of its cause, or the ids of the deciding suites and of unmet checks."""
    if report.failure:
        return [report.failure.found.rstrip(".")]
    if report.verdict == "regression" and (cause := cause_of(report.findings[: report.causes])):
        return [cause.title]
    decided = [suite.id for suite in report.suites if suite.verdict == report.verdict != "pass"]
    return [*decided, *(check.id for check in report.checks if check.status in ("failed", "missing"))]


def report_of(source: SourceFile) -> Report:
    """Return the report of a run. For a run's folder, it is rebuilt from the evidence.

    Raises:
        EvidenceError: the run is damaged, or was changed after it ended.
    """
    path = source.path
    if _is_run(path):
        return build(RunFolder(path))
    return read_report(path / _REPORT if path.is_dir() else path)


def _results(source: SourceFile, metric: str) -> ReadResults:
    """Read the candidate's answers to the questions. A ``report.json`` does not have them."""
    if not _is_run(source.path):
        note = "a report does not contain the answers: name the run's folder instead"
        return ReadResults(source, "report", read=1, notes=[note])
    folder = RunFolder(source.path)
    folder.check_sealed()
    manifest, answers = folder.manifest(), folder.answers()
    spec = recorded_spec(manifest.spec)
    given = {
        answer.item: answer
        for answer in answers
        if answer.suite == _SUITE and answer.role == "candidate" and answer.repeat == 0
    }
    asked = ResultSet(
        tool="assay",
        version=manifest.packages.get("assay", ""),
        task=f"questions of {spec.workload.data}",
        metric="right",
        asked=Asked(
            task={"shots": 0, "tokenizer": manifest.model_hash},
            generation={"temperature": 0, "max_tokens": spec.workload.token_limit},
            served={"model": manifest.model, "candidate": spec.candidate.backend, "device": spec.device},
        ),
        settings={"order_seed": str(spec.workload.order_seed)},
        adaptive=True,
        higher_is_better=True,
        items=tuple(
            _item(item, given[item.id]) for item in folder.items() if item.suite == _SUITE and item.id in given
        ),
    )
    return ReadResults(source, "answer", [asked], len(answers))


def _item(item: Item, answer: Answer) -> ResultItem:
    return ResultItem(
        key=item.id, prompt_hash=answer.prompt_hash, question=" ".join(item.prompt.split()),
        target=item.expected or "", answer=answer.text, parsed=answer.parsed,
        score=float(item.is_right(answer.parsed)), tokens=answer.completion_tokens, finish=answer.finish_reason,
    )  # fmt: skip


READER = results_reader("assay-run", "run of assay", _recognises, _results, extend=_with_verdict)
