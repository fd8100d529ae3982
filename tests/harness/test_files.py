from __future__ import annotations

from pathlib import Path

import pytest

from assay.harness.evidence.pack import replay_command
from assay.harness.files import portable, shown


@pytest.mark.parametrize(
    ("word", "written"),
    [
        ("/home/ci/repo/runs/1", "runs/1"),
        ("--model=/home/ci/repo/models/tiny", "--model=models/tiny"),
        ("--engine-arg=--model-path=/home/ci/repo/m", "--engine-arg=--model-path=m"),
        ("/opt/models/large", "/opt/models/large"),
        ("--candidate=mine:forward", "--candidate=mine:forward"),
        ("runs/1", "runs/1"),
        ("--out", "--out"),
    ],
)
def test_a_path_below_the_working_directory_is_relative(word: str, written: str) -> None:
    assert portable(word, Path("/home/ci/repo")) == written


def test_the_command_that_replays_a_pack_holds_no_path_of_its_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    command = replay_command(tmp_path / "runs/1/servers/reference/pack", "mine")
    assert command == "assay replay runs/1/servers/reference/pack --candidate mine"


def test_a_path_that_is_shown_begins_at_the_working_directory_or_at_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "repo").mkdir()
    monkeypatch.chdir(tmp_path / "repo")
    assert shown(tmp_path / "repo" / "runs" / "1") == "runs/1"
    assert shown(tmp_path / "models" / "m") == "~/models/m"
    assert shown(Path("/opt/m")) == "/opt/m"
    monkeypatch.setenv("HOME", "/")
    assert shown(Path("/opt/m")) == "/opt/m"
