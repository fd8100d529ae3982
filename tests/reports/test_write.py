from __future__ import annotations

import errno
import os
from pathlib import Path
from types import ModuleType

import pytest

from assay.harness.errors import EvidenceError
from assay.harness.judge.report import Report, read_report
from assay.reports import write

NAMES = ["report.json", "report.html", "report.junit.xml", "report.md"]


def test_writes_the_four_reports(any_report: Report, tmp_path: Path) -> None:
    paths = write.write_reports(any_report, tmp_path / "runs" / "1")
    assert [path.name for path in paths] == NAMES
    assert sorted(path.name for path in (tmp_path / "runs" / "1").iterdir()) == sorted(NAMES)
    assert read_report(paths[0]) == any_report
    assert all(any_report.verdict in path.read_text(encoding="utf-8").lower() for path in paths)


@pytest.mark.parametrize("size", [1_000_000, pytest.param(10_000_000, marks=pytest.mark.slow)])
def test_megabytes_of_hostile_text_make_small_reports(examples: ModuleType, tmp_path: Path, size: int) -> None:
    text = (examples.HOSTILE * (size // len(examples.HOSTILE) + 1)).encode("utf-8", "replace").decode()
    report = examples.hostile()
    suite = report.suites[0]
    flips = tuple(flip.model_copy(update={"prompt": text, "candidate_text": text}) for flip in suite.flips)
    parted = tuple(row.model_copy(update={"reference_text": text, "candidate_text": f"{text}x"}) for row in suite.divergences)
    large = suite.model_copy(update={"flips": flips, "divergences": parted})
    paths = write.write_reports(report.model_copy(update={"suites": (large,)}), tmp_path)
    assert read_report(paths[0]).suites[0].flips[0].candidate_text == text, "the document has it all"
    assert all(path.stat().st_size < 400_000 for path in paths[1:])


def test_a_full_disk_leaves_the_old_file_intact_and_no_partial_one(
    examples: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write.write_reports(examples.passing(), tmp_path)

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(EvidenceError, match=r"report\.json cannot be written: No space left"):
        write.write_reports(examples.regression(), tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(NAMES)
    assert read_report(tmp_path / "report.json").verdict == "pass"


def test_a_folder_that_is_a_file_is_an_error(examples: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(EvidenceError, match="cannot be written"):
        write.write_reports(examples.passing(), tmp_path / "file")


def test_a_renderer_that_fails_does_not_cost_the_json(
    examples: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(_: Report) -> str:
        raise RuntimeError("no chart today")

    monkeypatch.setattr(write, "to_html", broken)
    with pytest.raises(RuntimeError):
        write.write_reports(examples.passing(), tmp_path)
    assert read_report(tmp_path / "report.json").verdict == "pass"
