from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from assay.harness.engines.inside.control import latest_write_request, write_now
from assay.harness.errors import EvidenceError, UsageError
from assay.harness.evidence.error_table import ErrorTable, relative_l1
from assay.harness.evidence.shadow_errors import ShadowHeader, read_shadow_errors, write_shadow_errors

HEADER = ShadowHeader(reference="r", candidate="c", phases=("extend",))


def write(folder: Path, pid: int, head: int = 0, difference: float = 1.0, **header: object) -> None:
    cells = ErrorTable.of(np.array([[0, head, 0, 0, 0, 0]]), np.array([[difference, 2.0, 1.0, 0.0, 0.0]]))
    write_shadow_errors(folder / "shadow" / f"{pid}.safetensors", cells, HEADER.model_copy(update=header))


def test_processes_are_merged(tmp_path: Path) -> None:
    write(tmp_path, 1)
    write(tmp_path, 2, 1, 3.0)
    errors = read_shadow_errors(tmp_path)
    assert relative_l1(errors.cells.distance()).tolist() == [[0.5, 1.5]]


def test_missing_and_damaged_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="has no shadow errors"):
        read_shadow_errors(tmp_path)
    write(tmp_path, 1)
    write(tmp_path, 2, candidate="other")
    with pytest.raises(EvidenceError, match="different backends"):
        read_shadow_errors(tmp_path)
    file = tmp_path / "shadow" / "2.safetensors"
    file.write_bytes(file.read_bytes()[:-5])
    with pytest.raises(EvidenceError, match=r"2\.safetensors is damaged"):
        read_shadow_errors(tmp_path)


def test_a_write_request_waits_for_living_processes(tmp_path: Path) -> None:
    from os import getpid

    assert latest_write_request(tmp_path) == ""
    write(tmp_path, 2**22 + 1)  # above the largest process id of Linux

    def poke() -> None:
        assert latest_write_request(tmp_path)
        write(tmp_path, getpid(), write_request=latest_write_request(tmp_path))

    write_now(tmp_path, poke, timeout_s=1.0)
    with pytest.raises(EvidenceError, match="wrote nothing"):
        write_now(tmp_path, lambda: None, timeout_s=0.2)
