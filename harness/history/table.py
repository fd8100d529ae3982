"""The rows of a folder or a storage as a table that DuckDB queries: `RunTable`.

A place keeps the rows of what it has in ``rows/*.parquet``, beside the evidence. What is new is read once, and its rows are added
in a file of their own: none is ever changed, and what was removed later keeps its rows.
"""

from __future__ import annotations

import json
import math
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from assay.harness.errors import EvidenceError, UsageError
from assay.harness.evidence.cell import CELLS
from assay.harness.evidence.cell import FILE as CELL
from assay.harness.evidence.storage import ROWS, is_url, open_storage
from assay.harness.extras import require
from assay.harness.history.rows import COLUMNS, READ, ClaimRow, line_of_rows, rows_of
from assay.harness.judge.history import REPORT, RunList, is_run, unended
from assay.harness.text import did_you_mean, one_line

if TYPE_CHECKING:
    import duckdb

_NUMBERS = ("seconds", "value", "low", "high", "bound")
_FETCHES = 16
"""Files that are fetched at once."""
_AT_ONCE = 500
"""Runs whose files are held in memory at once."""


class RunTable:
    """The rows of a folder or a storage, those of what is new there included.

    Args:
        place: the folder, or a URL.
        command: what needs it, for an error.

    Raises:
        UsageError: there is no such folder, or the packages for it are missing.
        EvidenceError: it cannot be read.
    """

    def __init__(self, place: str, command: str = "assay runs") -> None:
        require("fleet", command)
        if not is_url(place) and not Path(place).expanduser().is_dir():
            raise UsageError(
                f"There is no folder {place}.", "a folder of runs, or a URL", "name it, or make a run first: assay run"
            )
        import duckdb

        self.place, self._storage = place, open_storage(place)
        self._before = f"{place.rstrip('/') if is_url(place) else Path(place)}/".removeprefix("./")
        self._table = duckdb.connect(":memory:")
        kinds = ", ".join(f'"{name}" {"DOUBLE" if name in _NUMBERS else "VARCHAR"}' for name in COLUMNS)
        self._table.execute(f"CREATE TABLE kept ({kinds}, part VARCHAR)")
        with tempfile.TemporaryDirectory() as scratch:
            self._load(Path(scratch))
            self._add_new(Path(scratch))
        # A run that changed has rows of both times: the last ones hold.
        self._table.execute(
            f"CREATE TABLE runs AS SELECT {_names()} FROM kept JOIN (SELECT run, max(part) AS part FROM kept GROUP BY run) "
            "USING (run, part) ORDER BY created, run"
        )
        self._table.execute("DROP TABLE kept")
        for setting in (
            "enable_external_access = false",
            "python_enable_replacements = false",
            "lock_configuration = true",
        ):
            self._table.execute(f"SET {setting}")

    def rows(self, where: str = "", columns: Sequence[str] = tuple(COLUMNS)) -> list[tuple[Any, ...]]:
        """Return rows, oldest run first.

        Args:
            where: a condition on `COLUMNS` in SQL; empty for all rows.
            columns: those that are wanted.

        Raises:
            UsageError: `where` is no condition on the columns.
        """
        rows = self._table.view("runs")
        if where:
            rows = self._filtered(rows, where)
        return list(rows.project(", ".join(f'"{name}"' for name in columns)).fetchall())

    def runs(self, where: str = "") -> RunList:
        """List the runs of which a row meets a condition, newest first.

        Raises:
            UsageError: see `rows`.
        """
        rows = self._table.view("runs")
        if where:
            wanted = self._filtered(rows, where).project("run").distinct().set_alias("wanted")
            rows = rows.set_alias("all_rows").join(wanted, "run", how="semi")
        by_run: dict[str, list[ClaimRow]] = {}
        for each in map(ClaimRow._make, rows.project(_names()).fetchall()):
            by_run.setdefault(each.run, []).append(each)
        lines = [line_of_rows(rows, self.address(run)) for run, rows in by_run.items()]
        if not where and not is_url(self.place):
            lines += unended(Path(self.place))
        return RunList(
            folder=self.place, runs=tuple(sorted(lines, key=lambda line: (line.created, line.folder), reverse=True))
        )

    def address(self, run: str) -> str:
        """Return the path or URL of a run by its name."""
        return f"{self._before}{run}"

    def _filtered(self, rows: duckdb.DuckDBPyRelation, where: str) -> duckdb.DuckDBPyRelation:
        import duckdb

        try:
            filtered = rows.filter(where)
            (parsed,) = self._table.execute(
                "SELECT json_serialize_sql(?)", [f"SELECT 1 FROM runs WHERE ({where})"]
            ).fetchall()
            if '"class":"SUBQUERY"' in parsed[0]:
                raise UsageError(
                    f"--where {where}: it holds a query of its own.",
                    "one condition on the columns",
                    "leave the inner query out",
                )
            filtered.limit(1).fetchall()
        except duckdb.Error as error:
            said = one_line(str(error).partition("\n")[0], 200)
            raise UsageError(
                f"--where {where}: {said}",
                f"a condition in SQL on the columns {', '.join(COLUMNS)}",
                _meant(said) or "such as --where \"model = 'tiny' and verdict = 'regression'\"",
            ) from None
        return filtered

    def _load(self, scratch: Path) -> None:
        """Load the rows that the place keeps."""
        keys = [key for key in self._storage.keys(ROWS) if key.endswith(".parquet")]

        def fetch(number: int) -> None:
            content = self._storage.read(keys[number])
            if content is not None:
                (scratch / f"{number:06}.parquet").write_bytes(content)

        with ThreadPoolExecutor(_FETCHES) as pool:
            list(pool.map(fetch, range(len(keys))))
        if not keys:
            return
        import duckdb

        try:
            self._table.execute(
                f"INSERT INTO kept SELECT {_names()}, filename FROM read_parquet(?, union_by_name = true, filename = true)",
                [str(scratch / "*.parquet")],
            )
        except duckdb.Error as error:
            raise EvidenceError(
                f"{self.place}/{ROWS} cannot be read: {one_line(str(error), 300)}",
                "Parquet files that assay wrote",
                f"remove {ROWS}: it is made again from the evidence that is there",
            ) from None

    def _add_new(self, scratch: Path) -> None:
        """Read what has no rows yet, and keep its rows in a new file."""
        known = set(self._table.execute("SELECT DISTINCT run, stamp FROM kept").fetchall())
        new = {name: stamp for name, stamp in self._there().items() if (name, stamp) not in known}
        if not new:
            return
        rows = [
            row for name, files in self._read(list(new)) for row in rows_of(name, self.address(name), new[name], files)
        ]
        lines = scratch / "new.json"
        lines.write_text("\n".join(map(_as_json, rows)), encoding="utf-8")
        kinds = {name: "DOUBLE" if name in _NUMBERS else "VARCHAR" for name in COLUMNS}
        made = f"{ROWS}/{datetime.now(UTC):%Y%m%dT%H%M%S%f}-{uuid4().hex[:8]}.parquet"
        self._table.execute(
            f"INSERT INTO kept SELECT {_names()}, 'new' FROM read_json(?, format = 'newline_delimited', columns = {kinds!r})",
            [str(lines)],
        )
        self._table.execute(
            f"COPY (SELECT {_names()} FROM kept WHERE part = 'new') TO '{scratch / 'new.parquet'}' (FORMAT parquet)"
        )
        self._storage.create(made, scratch / "new.parquet")

    def _there(self) -> Mapping[str, str]:
        """Stamps of the runs and cells that have a result, by name."""
        if is_url(self.place) and not self.place.startswith("file://"):
            return dict.fromkeys(self._storage.names(), "")
        return dict(_local_results(Path(self.place.removeprefix("file://")).expanduser()))

    def _read(self, names: list[str]) -> Iterator[tuple[str, Mapping[str, bytes]]]:
        if is_url(self.place) and not self.place.startswith("file://"):
            for start in range(0, len(names), _AT_ONCE):
                yield from self._storage.read_files(names[start : start + _AT_ONCE], READ).items()
            return
        for name in names:
            read = {file: self._storage.read(f"{name}/{file}") for file in READ}
            yield name, {file: content for file, content in read.items() if content is not None}


def has_cells(root: Path) -> bool:
    """Return True if a folder is a sweep's, or holds some."""
    return (root / CELLS).is_dir() or (root.is_dir() and any((path / CELLS).is_dir() for path in root.iterdir()))


def _local_results(root: Path) -> Iterator[tuple[str, str]]:
    """Yield the name and the stamp of each run in a folder, and of each cell of the sweeps in it, that has a result.

    The folder may be a sweep's own.
    """
    if (root / CELLS).is_dir():
        yield from _results_in(f"{root}/{CELLS}", f"{CELLS}/", CELL)
    for name, stamp in _results_in(str(root), "", REPORT):
        if is_run(root / name):
            yield name, stamp
    for sweep in sorted(path.name for path in root.iterdir() if (path / CELLS).is_dir()):
        yield from _results_in(f"{root}/{sweep}/{CELLS}", f"{sweep}/{CELLS}/", CELL)


def _results_in(folder: str, before: str, file: str) -> Iterator[tuple[str, str]]:
    """Yield the names, after a prefix, and the stamps of the folders in a folder that hold a file.

    Text instead of paths: there may be ten thousand.
    """
    for name in sorted(os.listdir(folder)):
        try:
            status = os.stat(f"{folder}/{name}/{file}")
        except OSError:
            continue
        yield before + name, f"{status.st_mtime_ns}-{status.st_size}"


def _as_json(row: ClaimRow) -> str:
    """Return a row as JSON, in which infinity is a word that DuckDB reads as a number, and NaN is null."""
    values = row._asdict()
    for name in _NUMBERS:
        number = values[name]
        if number is not None and not math.isfinite(number):
            values[name] = None if math.isnan(number) else str(number)
    return json.dumps(values)


def _names() -> str:
    return ", ".join(f'"{name}"' for name in COLUMNS)


def _meant(said: str) -> str:
    """Return "did you mean" for the column that an error of DuckDB names."""
    named = said.split('"')[1:2]
    return did_you_mean(named[0], list(COLUMNS)) if named else ""
