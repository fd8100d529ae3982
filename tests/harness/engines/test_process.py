import os
import sys
import time
from pathlib import Path

import pytest

from assay.harness.engines.process import LINE_WIDTH, TAIL_LINES, ServerProcess, _telling_lines


def run_to_end(folder: Path, code: str, secret: str = "") -> ServerProcess:
    process = ServerProcess([sys.executable, "-c", code], os.environ, folder, folder / "logs" / "server.log", secret)
    deadline = time.monotonic() + 15
    while process.exit_status is None and time.monotonic() < deadline:
        time.sleep(0.05)
    return process


def test_log_tail_shows_output_and_errors_of_this_launch_only_without_its_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_to_end(tmp_path, "pass").log_tail() == "Its log (logs/server.log) is empty."
    run_to_end(tmp_path, "print('of the first launch')")
    process = run_to_end(tmp_path, "import sys; print('out', 'abc123'); print('err', file=sys.stderr)", "abc123")
    assert sorted(process.log_tail().splitlines()) == ["  err", "  out ***", "Its log (logs/server.log) ends:"]
    assert "first launch" in process.log.read_text()


def test_what_it_is_doing_is_no_warning(tmp_path: Path) -> None:
    code = """
import warnings
print('[12:00:01] Load weight begin.', flush=True)
warnings.warn('Only CUDA supports AWQ')
print('/lib/gguf.py:76: UserWarning: Only CUDA supports GGUF')
print('  warnings.warn(f"Only CUDA supports GGUF")')
print("[12:00:02] '--disable-cuda-graph' is deprecated and will be removed")
print('[12:00:02] WARNING server_args.py: no GPU')
"""
    process = run_to_end(tmp_path, code)
    assert process.last_line(warnings=False) == "[12:00:01] Load weight begin."
    assert "no GPU" in process.last_line()


def test_the_end_of_the_last_traceback_is_shown_with_what_follows() -> None:
    short = ["before", "Traceback (most recent call last):", "  frame", "KeyError: first"]
    assert _telling_lines("\n".join(short)) == short
    trace = ["Scheduler hit an exception: Traceback (most recent call last):", *[f"  frame {n}" for n in range(40)]]
    log = [*short, *["before"] * 50, *trace, "ValueError: the reason"] + [f"after {n}" for n in range(60)]
    told = _telling_lines("\n".join(log))
    assert {"ValueError: the reason", "  frame 39", "..."} <= set(told)
    assert told[-1] == "after 59"
    assert not {"before", "KeyError: first"} & set(told)
    assert len(told) <= TAIL_LINES + 1


def test_noise_and_empty_lines_are_left_out_and_long_lines_cut() -> None:
    noise = ["nanobind: leaked 64 types!", ' - leaked type "ATOMIC_OP"', " - ... skipped remainder", ""]
    noise.append("See https://nanobind.readthedocs.io/en/latest/refleaks.html")
    noise.append("                    [--page-size PAGE_SIZE] [--device DEVICE]")
    noise.append('[13:05:05] INFO:     127.0.0.1:36848 - "POST /freeze_gc HTTP/1.1" 200 OK')
    noise.append('[13:05:04] INFO:     127.0.0.1:36842 - "GET /health HTTP/1.1" 503 Service Unavailable')
    failed = '[13:05:05] INFO:     127.0.0.1:36848 - "POST /v1/chat/completions HTTP/1.1" 500 Internal Server Error'
    told = _telling_lines("\n".join(["the reason", failed, *noise * 20, "x" * 1000]))
    assert told == ["the reason", failed, "x" * LINE_WIDTH]
