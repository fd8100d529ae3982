"""Runs in storages, as commands name them: ``--out URL``, and the URL of a run or of many."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from uuid import uuid4

import pytest

from assay.harness.evidence.cell import CellRecord, write_cell
from assay.harness.evidence.storage import open_storage
from assay.reports.json_report import to_json
from assay.reports.write import write_reports

pytest.importorskip("fsspec")


@pytest.fixture
def place(tmp_path: Path, examples: ModuleType, monkeypatch: pytest.MonkeyPatch) -> str:
    """The URL of a storage that has a run ``wrong``; the working directory is empty."""
    write_reports(examples.regression(), tmp_path / "made")
    (tmp_path / "made" / "manifest.json").write_text('{"nonce": "1"}')
    url = f"memory://{uuid4()}"
    open_storage(url).put_folder(tmp_path / "made", "wrong")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return url


@pytest.fixture
def fake_run(monkeypatch: pytest.MonkeyPatch, examples: ModuleType) -> list[str]:
    """`assay run` without servers: it returns the report of this name, and leaves a manifest in the folder."""
    named = ["passing"]

    def run(spec: object, folder: Path, **_: object) -> object:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "manifest.json").write_text('{"nonce": "2"}')
        return getattr(examples, named[0])()

    monkeypatch.setattr("assay.harness.run.run", run)
    return named


def test_a_run_that_has_ended_is_stored(
    call: Callable[..., int], capsys: pytest.CaptureFixture[str], place: str, fake_run: list[str]
) -> None:
    assert call("run", "--out", f"{place}/nightly") == 0
    assert f"Stored: {place}/nightly" in capsys.readouterr().out
    storage = open_storage(place)
    assert storage.names() == ["nightly", "wrong"]
    assert {"manifest.json", "report.json", "report.html", "report.md", "report.junit.xml"} <= storage.file_hashes("nightly").keys()
    assert Path("runs/nightly/report.html").is_file(), "it is made here"
    assert call("run", "--out", f"{place}/nightly") == 2
    assert "has nightly already" in capsys.readouterr().err


def test_a_run_that_has_not_ended_is_not_stored(
    call: Callable[..., int], capsys: pytest.CaptureFixture[str], place: str, fake_run: list[str]
) -> None:
    fake_run[0] = "failed_server"
    assert call("run", "--out", f"{place}/nightly") == 3
    assert "Not stored" in capsys.readouterr().out
    assert open_storage(place).names() == ["wrong"]


def test_a_name_that_is_taken_is_refused_before_anything_starts(
    call: Callable[..., int], capsys: pytest.CaptureFixture[str], place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("assay.harness.run.run", lambda *_, **__: pytest.fail("it was started"))
    assert call("gate", "--out", f"{place}/wrong") == 2
    assert "never changed" in capsys.readouterr().err


def test_a_stored_run_is_shown_and_listed(
    call: Callable[..., int], capsys: pytest.CaptureFixture[str], place: str, examples: ModuleType
) -> None:
    assert call("show", f"{place}/wrong", "--json") == 1
    assert json.loads(capsys.readouterr().out) == json.loads(to_json(examples.regression()))
    assert call("show", f"{place}/wrong") == 1, "it was fetched already"
    Path("runs/wrong/manifest.json").write_text("{}")
    assert call("show", f"{place}/wrong") == 2
    assert "is another run than" in " ".join(capsys.readouterr().err.split())
    assert call("show", f"{place}/right") == 3
    assert "no complete right" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["show", "report"])
def test_the_url_of_a_cell_stands_for_its_run(
    call: Callable[..., int], capsys: pytest.CaptureFixture[str], tmp_path: Path, examples: ModuleType, place: str, command: str
) -> None:
    cells = {"ran": "run", "checked": "check"}
    for key, word in cells.items():
        folder = tmp_path / key
        if word == "run":
            write_reports(examples.regression(), folder / "out")
            (folder / "out" / "manifest.json").write_text('{"nonce": "1"}')
        (folder / "log.txt").parent.mkdir(exist_ok=True)
        (folder / "log.txt").write_text("its last words")
        write_cell(folder, CellRecord(key=key, command=(word,), axes={}, verdict="regression", created="2026-11-25T10:00:00Z"))
        open_storage(f"{place}/nightly").put_folder(folder, f"cells/{key}")
    url = f"{place}/nightly/cells"
    for _ in range(2):  # fetched, and there already
        if command == "show":
            assert call("show", f"{url}/ran", "--json") == 1
            assert json.loads(capsys.readouterr().out) == json.loads(to_json(examples.regression()))
        else:
            call("report", f"{url}/ran")
            assert "is not a run" not in capsys.readouterr().err
        assert Path("runs/nightly/cells/ran/out/report.json").is_file()
        assert call(command, f"{url}/checked") == 2
        said = " ".join(capsys.readouterr().err.split())
        assert "runs/nightly/cells/checked is a cell of a sweep that holds no run." in said
        assert "see its log: runs/nightly/cells/checked/log.txt" in said
    assert call(command, "runs/nightly/cells/checked") == 2
    assert "holds no run" in capsys.readouterr().err
    if command == "show":
        assert call("show", "runs/nightly/cells/ran") == 1
    Path("runs/nightly/cells/ran/cell.json").write_text("{}")
    assert call(command, f"{url}/ran") == 2
    assert "is another run than" in " ".join(capsys.readouterr().err.split())


def test_a_storage_is_listed_and_made_a_site(call: Callable[..., int], capsys: pytest.CaptureFixture[str], place: str) -> None:
    pytest.importorskip("duckdb")
    assert call("runs", place, "--where", "verdict = 'regression'") == 0
    assert f"{place}/wrong" in capsys.readouterr().out
    assert call("runs", place, "--where", "verdict = 'pass'", "--json") == 0
    assert json.loads(capsys.readouterr().out)["runs"] == []
    assert call("runs", place, "--site", "public") == 0
    assert Path("public/reports/wrong.html").read_text().startswith("<!doctype html>")
    assert 'href="reports/wrong.html"' in Path("public/index.html").read_text()


def test_a_trend_is_shown_and_has_a_page(call: Callable[..., int], capsys: pytest.CaptureFixture[str], place: str) -> None:
    pytest.importorskip("duckdb")
    assert call("trend", "loss-of-accuracy", place, "--html", "trend.html") == 0
    out = capsys.readouterr().out
    assert "loss-of-accuracy: sage_attn_as_shipped against torch_native" in out
    assert "No move was found." in out
    assert "on cpu: 1 number, the last 85.5" in Path("trend.html").read_text()
    assert call("trend", "loss-of-accuracy", place, "--json") == 0
    assert json.loads(capsys.readouterr().out)["schema"] == "assay.trend/1"
