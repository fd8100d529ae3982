from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from assay.harness.evidence.counters import TABLE_LAYERS, CounterFile, CounterRow, read_counters, total_calls


def row(phase: str = "extend", cached: bool = False) -> CounterRow:
    return CounterRow(backend="b", kernel="k", phase=phase, cached_prefix=cached)


def test_processes_are_added_up(tmp_path: Path) -> None:
    for name in ("1", "2"):
        file = CounterFile(tmp_path, name)
        index = file.row(row())
        assert file.row(row()) == index
        for layer in (0, 0, 7):
            file.add(index, layer)
        file.add(file.row(row("decode")), 3)
    counts = {count.phase: count for count in read_counters(tmp_path)}
    assert counts["extend"].calls_by_layer == {0: 4, 7: 2}
    assert counts["decode"].calls_by_layer == {3: 2}
    assert total_calls(counts.values()) == 8


def test_a_layer_beyond_the_table_is_an_error(tmp_path: Path) -> None:
    file = CounterFile(tmp_path, "1")
    with pytest.raises(IndexError):
        file.add(file.row(row()), TABLE_LAYERS)


def test_counts_survive_sigkill(tmp_path: Path) -> None:
    code = (
        "import sys, os, signal; from pathlib import Path; from assay.harness.evidence.counters import CounterFile, CounterRow\n"
        "f = CounterFile(Path(sys.argv[1]), 'p')\n"
        "i = f.row(CounterRow(backend='b', kernel='k', phase='extend', cached_prefix=True))\n"
        "[f.add(i, 2) for _ in range(1000)]; os.kill(os.getpid(), signal.SIGKILL)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], env={**os.environ}, check=False)
    assert done.returncode == -signal.SIGKILL
    assert [count.calls_by_layer for count in read_counters(tmp_path)] == [{2: 1000}]
