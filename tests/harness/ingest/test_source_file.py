from __future__ import annotations

import codecs
from pathlib import Path

import pytest

from assay.harness.ingest.source_file import SourceFile


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "x.log"


def lines_of(path: Path) -> list[tuple[int, str]]:
    return [tuple(line) for line in SourceFile.of(path).lines()]


@pytest.mark.parametrize(
    ("data", "lines"),
    [
        (b"", []),
        (b"one", ["one"]),
        (b"one\n", ["one"]),
        (b"one\r\ntwo\n\nfour\r", ["one", "two", "", "four"]),
        ("10%\r20%\nx\x0cy\x85z\n".encode(), ["10%\r20%", "x\x0cy\x85z"]),  # only a line feed ends a line
        (codecs.BOM_UTF8 + "é\nü".encode(), ["é", "ü"]),
        ("é\r\nü\n".encode("utf-16"), ["é", "ü"]),
    ],
)
def test_lines_are_those_of_grep(path: Path, data: bytes, lines: list[str]) -> None:
    path.write_bytes(data)
    assert lines_of(path) == list(enumerate(lines, 1))


def test_only_lines_that_do_not_decode_are_counted(path: Path) -> None:
    path.write_bytes("é\n".encode() + b"\xe9\n" + "ü\n".encode() + b"\xfc\r\n")
    file = SourceFile.of(path)
    for _ in "ab":  # once, however often it is read
        assert [text for _, text in file.lines()] == ["é", "\ufffd", "ü", "\ufffd"]
        assert (file.foreign, file.first_foreign) == (2, 2)
    assert file.encoding_notes() == ("2 lines are not UTF-8 (the first is line 2)",)


def test_a_folder_has_the_size_of_its_files(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a/b").write_bytes(b"123")
    (tmp_path / "c").write_bytes(b"45")
    folder = SourceFile.of(tmp_path)
    assert (folder.size, SourceFile.of(tmp_path / "c").size) == (5, 2)
