from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from assay.harness.conditions import CACHED_PREFIX, PLACE, POSITION
from assay.harness.errors import EvidenceError, UsageError
from assay.harness.evidence.error_sums import SUMS
from assay.harness.evidence.shadow_errors import (
    CONDITIONS,
    ShadowErrors,
    ShadowHeader,
    WorstCase,
    condition_numbers,
    read_shadow_errors,
    write_shadow_errors,
)
from assay.harness.server.write_request import is_written, latest_write_request, request_write, write_now

SHAPE = tuple(len(labels) for labels in CONDITIONS.values())
HEADER = ShadowHeader(reference="r", candidate="c", phases=("extend",))


def row(difference: float, size: float, count: float) -> list[float]:
    values = {"difference": difference, "reference_size": size, "compared": count}
    return [values.get(name, 0.0) for name in SUMS]


def made(index: list[list[int]], sums: list[list[float]], header: ShadowHeader = HEADER) -> ShadowErrors:
    return ShadowErrors(np.array(index), np.array(sums), (header,))


def write(folder: Path, pid: int, cells: ShadowErrors) -> None:
    write_shadow_errors(folder / "shadow" / f"{pid}.safetensors", cells.index, cells.sums, cells.headers[0])


def labels_of(phase: str, new: list[int], prefix: list[int]) -> list[tuple[str, str, str]]:
    _, prefixes, positions, places = np.unravel_index(condition_numbers(phase, new, prefix), SHAPE)
    return [(CACHED_PREFIX.labels[a], POSITION.labels[b], PLACE[c]) for a, b, c in zip(prefixes, positions, places, strict=True)]


def test_conditions_of_every_query() -> None:
    assert labels_of("extend", [2, 1, 1, 1], [0, 1, 15, 16]) == [
        ("0", "0", "first"),
        ("0", "1-15", "first"),
        ("1", "0", "between"),
        ("2-15", "0", "between"),
        (">= 16", "0", "last"),
    ]
    long = labels_of("extend", [257], [2])
    assert [long[i] for i in (15, 16, 63, 64, 255, 256)] == [
        ("2-15", label, "only") for label in ("1-15", "16-63", "16-63", "64-255", "64-255", ">= 256")
    ]
    assert set(np.unravel_index(condition_numbers("decode", [1, 1], [3, 9]), SHAPE)[0]) == {1}


def test_sums_are_merged_not_ratios() -> None:
    cells = made([[0, 0, 0, 0, 0, 0], [0, 0, 0, 3, 0, 0]], [row(1.0, 2.0, 1), row(0.0, 98.0, 99)])
    assert cells.table(by=("layer", "head")).relative_l1.tolist() == [[pytest.approx(1 / 100)]]
    assert cells.table(by=("prefix",)).relative_l1[[0, 3]].tolist() == [0.5, 0.0]
    assert np.isnan(cells.table(by=("prefix",)).relative_l1[[1, 2]]).all()
    assert cells.table(by=()).elements == 100
    assert cells.table(by=("head",), where={"prefix": ("1", ">= 16")}).relative_l1.tolist() == [0.0]


def test_a_cell_that_was_not_observed_is_not_zero() -> None:
    cells = made([[0, 1, 0, 0, 0, 0], [2, 0, 0, 0, 0, 0]], [row(1.0, 2.0, 1)] * 2)
    observed = ~np.isnan(cells.table().relative_l1)
    assert observed.tolist() == [[False, True], [False, False], [True, False]]
    assert cells.observed("phase") == ("extend",)
    decode = cells.table(where={"phase": "decode"})
    for values in (decode.relative_l1, decode.nonfinite_share):
        assert values.shape == (3, 2)
        assert np.isnan(values).all()


@pytest.mark.parametrize(("by", "where"), [(("colour",), {}), (("layer",), {"phase": "train"}), (("head",), {"layer": 9})])
def test_unknown_dimensions_and_labels_are_refused(by: tuple[str, ...], where: dict[str, str]) -> None:
    with pytest.raises(KeyError, match="expected one of"):
        made([[0, 0, 0, 0, 0, 0]], [row(1.0, 2.0, 1)]).table(by=by, where=where)


def test_processes_are_merged(tmp_path: Path) -> None:
    case = WorstCase(layer=0, phase="extend", relative_l1=float("inf"), head=1, request="a", position=9, prefix=8, new=3,
                     sequences=1)  # fmt: skip
    milder = case.model_copy(update={"relative_l1": 2.0, "request": "b"})
    first = made([[0, 0, 0, 0, 0, 0]], [row(1.0, 2.0, 1)], HEADER.model_copy(update={"worst": (milder,)}))
    write(tmp_path, 1, first)
    write(tmp_path, 2, made([[0, 1, 0, 0, 0, 0]], [row(3.0, 2.0, 1)], HEADER.model_copy(update={"worst": (case,)})))
    cells = read_shadow_errors(tmp_path)
    assert cells.table().relative_l1.tolist() == [[0.5, 1.5]]
    assert [found.request for found in cells.worst] == ["a"]
    assert cells.worst[0].relative_l1 == float("inf")


def test_missing_and_damaged_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="has no errors of a shadow"):
        read_shadow_errors(tmp_path)
    write(tmp_path, 1, made([[0, 0, 0, 0, 0, 0]], [row(1.0, 2.0, 1)]))
    write(tmp_path, 2, made([[0, 0, 0, 0, 0, 0]], [row(1.0, 2.0, 1)], HEADER.model_copy(update={"candidate": "other"})))
    with pytest.raises(EvidenceError, match="different backends"):
        read_shadow_errors(tmp_path)
    file = tmp_path / "shadow" / "2.safetensors"
    file.write_bytes(file.read_bytes()[:-5])
    with pytest.raises(EvidenceError, match=r"2\.safetensors is damaged"):
        read_shadow_errors(tmp_path)


def test_a_write_request_waits_for_living_processes(tmp_path: Path) -> None:
    from os import getpid

    assert latest_write_request(tmp_path) == ""
    request_write(tmp_path, "first")
    assert latest_write_request(tmp_path) == "first"
    assert not is_written(tmp_path, "first")

    dead = 2**22 + 1  # above the largest process id of Linux
    write(tmp_path, dead, made([[0, 0, 0, 0, 0, 0]], [row(1.0, 2.0, 1)]))
    assert not is_written(tmp_path, "first")

    def poke() -> None:
        answer = HEADER.model_copy(update={"write_request": latest_write_request(tmp_path)})
        write(tmp_path, getpid(), made([[0, 0, 0, 0, 0, 0]], [row(1.0, 2.0, 1)], answer))

    write_now(tmp_path, poke, timeout_s=1.0)
    assert not is_written(tmp_path, "first")
    with pytest.raises(EvidenceError, match="wrote nothing"):
        write_now(tmp_path, lambda: None, timeout_s=0.2)
