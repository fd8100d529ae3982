"""assay's own results: a run's folder, which has the answers, and a ``report.json``, which has the verdict alone."""

from __future__ import annotations

from assay.harness.config import recorded_spec
from assay.harness.evidence.folder import RunFolder
from assay.harness.evidence.records import Answer, Item
from assay.harness.ingest.result import Document, Fact
from assay.harness.ingest.results.result_set import Reading, ResultItem, ResultSet, document_of
from assay.harness.ingest.source import Source
from assay.harness.judge.binding import parsed_from_text
from assay.harness.judge.build import build
from assay.harness.judge.report import Report
from assay.harness.judge.report_file import read_report

SUITE = "mmlu"


class AssayRun:
    """Reads runs of assay."""

    id = "assay-run"
    title = "run of assay"

    def recognises(self, source: Source) -> bool:
        """A folder with a manifest and items, or JSON with the schema of a report."""
        if source.path.is_dir():
            return all((source.path / name).is_file() for name in ("manifest.json", "items.jsonl"))
        return source.path.suffix == ".json" and '"assay.report/' in source.head_text[:4_000]

    def read(self, source: Source) -> Document:
        """See `FileReader`."""
        report = self.report(source)
        document = document_of(source, self.id, self.title, self.results(source))
        verdict = Fact(id="verdict", title=f"verdict of {report.run_id}", text=f"{report.verdict}: {report.headline}")
        return document.model_copy(update={"facts": (verdict, *document.facts)})

    def report(self, source: Source) -> Report:
        """Its report: of a folder, made again from the evidence.

        Raises:
            EvidenceError: it is damaged, or was changed after the run had ended.
        """
        return build(RunFolder(source.path)) if source.path.is_dir() else read_report(source.path)

    def results(self, source: Source, metric: str = "") -> Reading:
        """The candidate's answers to the questions. A ``report.json`` has none. `metric` is not used.

        Raises:
            EvidenceError: the folder is damaged.
        """
        reading = Reading(unit="answer")
        if not source.path.is_dir():
            reading.notes.append("a report has no answers: name the folder of the run")
            return reading
        folder = RunFolder(source.path)
        folder.check_sealed()
        manifest = folder.manifest()
        spec = recorded_spec(manifest.spec)
        items = folder.items()
        answers = parsed_from_text(folder.answers(), items)
        reading.read = len(answers)
        given = {one.item: one for one in answers if one.suite == SUITE and one.role == "candidate" and one.repeat == 0}
        asked = [item for item in items if item.suite == SUITE]
        reading.sets.append(
            ResultSet(
                source=str(source.path),
                format=self.id,
                tool="assay",
                version=manifest.packages.get("assay", ""),
                task=f"questions of {spec.data}",
                metric="right",
                shots=0,
                model=manifest.model,
                tokenizer=manifest.model_hash,
                sampling={"temperature": "0", "max_tokens": str(spec.token_limit)},
                settings={"candidate": spec.candidate, "order_seed": str(spec.order_seed), "device": spec.device},
                adaptive=True,
                items=tuple(_item(item, given[item.id]) for item in asked if item.id in given),
            )
        )
        return reading


def _item(item: Item, answer: Answer) -> ResultItem:
    return ResultItem(
        key=item.id,
        prompt_hash=answer.prompt_hash,
        target=item.expected or "",
        answer=answer.text,
        parsed=answer.parsed,
        score=float(item.is_right(answer.parsed)),
        latency_s=answer.latency_s,
    )
