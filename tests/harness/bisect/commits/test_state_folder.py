"""The folder of a bisection before its state is written."""

from __future__ import annotations

from pathlib import Path

from assay.harness.bisect.commits.state import BisectFolder
from assay.harness.files import is_unused


def test_a_folder_that_was_only_locked_counts_as_new_and_one_with_other_files_does_not(tmp_path: Path) -> None:
    folder = BisectFolder(tmp_path / "out")
    with folder.locked():
        assert is_unused(folder.path, folder.PARTS)
        (folder.path / "thesis.txt").write_text("mine")
        assert not is_unused(folder.path, folder.PARTS)
