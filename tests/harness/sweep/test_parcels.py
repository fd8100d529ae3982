"""Folders as parcels."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from assay.harness.sweep import parcels
from assay.harness.sweep.parcels import Changes, pack, unpack


def test_what_changed_travels_and_nothing_else(tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    (here / "deep").mkdir(parents=True)
    (here / "a").write_text("1")
    (here / "deep" / "b").write_text("2")
    (here / ".lock").write_text("9")
    (here / ".c.1.part").write_text("half")
    (here / "whole.part").write_text("3")
    (here / "link").symlink_to("/etc/passwd")
    changes = Changes(here)
    first = changes.collect()
    assert first == {"a": b"1", "deep/b": b"2", "whole.part": b"3"}
    assert changes.collect() == {}
    unpack(first, there)
    (here / "a").unlink()
    (here / "deep" / "b").write_text("33")
    os.utime(here / "deep" / "b", ns=(1, 1))
    second = changes.collect()
    assert second == {"a": None, "deep/b": b"33"}
    unpack(second, there)
    assert pack(there) == {"deep/b": b"33", "whole.part": b"3"} == pack(here)


@pytest.mark.parametrize(("small", "meanwhile"), [(100, {"a": b"2"}), (0, {})])
def test_what_changes_without_a_change_of_its_time_comes_at_once_or_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small: int, meanwhile: dict[str, bytes]
) -> None:
    """As a file of counts does that a server has mapped into its memory."""
    monkeypatch.setattr(parcels, "_SMALL", small)
    (tmp_path / "a").write_text("1")
    os.utime(tmp_path / "a", ns=(1, 1))
    changes = Changes(tmp_path)
    changes.collect()
    (tmp_path / "a").write_text("2")
    os.utime(tmp_path / "a", ns=(1, 1))
    assert changes.collect() == meanwhile
    assert changes.collect(at_rest=True) == ({} if meanwhile else {"a": b"2"})
    assert changes.collect(at_rest=True) == {}


def test_no_copy_has_an_effect_without_its_cause(tmp_path: Path) -> None:
    for name in ("admissions.jsonl", "7.calls.i64", "records.jsonl"):
        (tmp_path / name).write_text("1")
    assert [*Changes(tmp_path).collect()] == ["records.jsonl", "7.calls.i64", "admissions.jsonl"]


def test_a_file_travels_alone(tmp_path: Path) -> None:
    (tmp_path / "kernel.py").write_text("x")
    unpack(pack(tmp_path / "kernel.py"), tmp_path / "given")
    assert (tmp_path / "given").read_text() == "x"
    assert pack(tmp_path / "nothing") == {}


@pytest.mark.parametrize("name", ["../out", "/tmp/out", "a/../../out"])
def test_no_file_leaves_its_folder(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match="leads out"):
        unpack({name: b"x"}, tmp_path / "folder")


def test_a_parcel_has_a_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parcels, "PARCEL", 10)
    for name, size in (("a", 6), ("b", 6), ("large", 11)):
        (tmp_path / name).write_bytes(b"x" * size)
    changes = Changes(tmp_path)
    sent = [set(changes.collect()) for _ in range(3)]
    assert sorted(map(sorted, sent)) == [[], ["a"], ["b"]], "what is larger waits for the end"
    assert set(changes.collect(at_rest=True)) == {"large"}
    assert changes.collect(at_rest=True) == {}
    assert set(pack(tmp_path)) == {"a", "b", "large"}
