"""A file of a run: read back as written, refused if damaged or of another run, one for each process where there are several."""

from __future__ import annotations

from pathlib import Path

import pytest

from assay.harness.errors import EvidenceError
from assay.harness.evidence.faults import SEEDED_CALLS, SeededCalls
from assay.harness.evidence.folder import RunFolder
from assay.harness.evidence.manifest import COMMON_SETTINGS, QUESTION_PLAN, CommonSettings
from assay.harness.evidence.run_file import REPEAT_RUN, RUN_AGAIN

SETTINGS = CommonSettings(flags=("--page-size", "1"))


def calls(number: int) -> SeededCalls:
    return SeededCalls(fault="gain", calls=number, changed=0, refused=0)


def test_what_was_written_is_read_with_the_nonce_of_the_run(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path, "ours")
    assert folder.read(COMMON_SETTINGS) is None
    folder.write(COMMON_SETTINGS, SETTINGS)
    folder.write(COMMON_SETTINGS, SETTINGS, "candidate")
    assert folder.read(COMMON_SETTINGS) == SETTINGS.model_copy(update={"run": "ours"})
    assert (folder.server_folder("candidate") / COMMON_SETTINGS.name).exists()
    assert folder.read(COMMON_SETTINGS, "reference") is None
    COMMON_SETTINGS.write(tmp_path, SETTINGS)
    assert COMMON_SETTINGS.read(tmp_path) == SETTINGS
    with pytest.raises(EvidenceError, match="belongs to no run, but its folder to run ours"):
        folder.read(COMMON_SETTINGS)


def test_a_damaged_file_says_what_to_do(tmp_path: Path) -> None:
    for file, do in ((COMMON_SETTINGS, REPEAT_RUN), (QUESTION_PLAN, RUN_AGAIN)):
        (tmp_path / file.name).write_text("{")
        with pytest.raises(EvidenceError, match=rf"{file.name} is damaged") as caught:
            RunFolder(tmp_path, "ours").read(file)  # type: ignore[arg-type]
        assert caught.value.do == do


def test_each_process_has_a_file_of_its_own(tmp_path: Path) -> None:
    for number in (20, 3):
        SEEDED_CALLS.write(tmp_path, calls(number), "ours", str(number))
    assert [one.calls for one in SEEDED_CALLS.read_each(tmp_path, "ours").values()] == [20, 3]
    assert list(SEEDED_CALLS.read_each(tmp_path)) == ["20", "3"]
    SEEDED_CALLS.write(tmp_path, calls(1), "theirs", "4")
    with pytest.raises(EvidenceError, match=r"4\.json belongs to run theirs"):
        SEEDED_CALLS.read_each(tmp_path, "ours")
    SEEDED_CALLS.write(tmp_path / "empty", calls(1))
    assert len(SEEDED_CALLS.read_each(tmp_path / "empty")) == 1
