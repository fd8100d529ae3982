"""The cause of a server's failure, read off its log; `tests/data/server_failures` says where the logs come from."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from assay.harness.engines.failures import CAUSES, ended, read
from assay.harness.sides import profile_of

LOGS = Path(__file__).parents[2] / "data" / "server_failures"
EXPECTED = tomllib.loads((LOGS / "expected.toml").read_text())
SILENT = "silent"
"""The log of a server that was killed before it could say anything."""


@pytest.mark.parametrize("name", sorted(EXPECTED.keys() - {SILENT}))
def test_the_line_that_names_the_cause_is_found_with_one_remedy(name: str) -> None:
    told = read((LOGS / f"{name}.log").read_text())
    expected = EXPECTED[name]
    assert expected["line"] in told.line
    assert (told.cause, expected["do"] in told.do) == (expected["cause"], True), told
    assert "\n" not in told.line + told.do
    assert "{" not in told.do, "a group of the pattern that was not filled in"
    assert "[" not in told.do, "a condition that was not decided"


def test_every_log_is_expected_and_every_cause_has_one() -> None:
    assert {path.stem for path in LOGS.glob("*.log")} == EXPECTED.keys()
    assert len(EXPECTED) >= 36
    known = {cause for cause, _, _ in (*profile_of("sglang").causes, *CAUSES)} | {"kernel"}
    assert known - {one["cause"] for one in EXPECTED.values()} == {"stopped"}, "a SIGTERM leaves no log of its own"


def test_a_server_that_ended_itself_says_why_and_not_only_how() -> None:
    error = ended(
        "sglang",
        "the candidate server (x)",
        "was killed by SIGKILL",
        "during start-up",
        (LOGS / "jit_ninja.log").read_text(),
        "Its log ends:\n  y",
    )
    assert error.found == (
        "the candidate server (x) failed during start-up: FileNotFoundError: [Errno 2] No such file or directory: 'ninja'"
    )
    assert error.cause == "jit-ninja"
    assert str(error).splitlines()[0] == error.found
    assert error.details == "SGLang ended its own processes during start-up.\nIts log ends:\n  y"


def test_settings_and_survived_lines_are_not_the_cause_of_a_kill() -> None:
    settings = "[2026-11-22 10:00:01] server_args={'abort_timeout': 5, 'custom_sigquit_handler': None}"
    for log in (f"{settings}\n[2026-11-22 10:00:02] error: a request failed\n", (LOGS / "silent.log").read_text()):
        error = ended("sglang", "the server", "was killed by SIGKILL", "after it was ready", log, "")
        assert error.found == "the server was killed by SIGKILL after it was ready."
        assert error.cause == "killed"
        assert error.details == "It was killed by SIGKILL after it was ready.\n"
    assert read(settings).line == ""


@pytest.mark.parametrize(
    ("how", "cause", "do"),
    [
        ("was killed by SIGSEGV", "crash", "assay check"),
        ("was killed by SIGILL", "illegal-instruction", "this CPU"),
        ("was killed by SIGBUS", "bus-error", "/dev/shm"),
        ("was killed by SIGTERM", "stopped", "SIGTERM"),
    ],
)
def test_a_signal_without_a_word_is_a_known_cause(how: str, cause: str, do: str) -> None:
    survived = "Traceback (most recent call last):\n  File\nModuleNotFoundError: No module named 'optional'\n"
    for log in ("", survived):
        error = ended("sglang", "the server", how, "during start-up", log, "")
        assert (error.found, error.cause) == (f"the server {how} during start-up.", cause)
        assert do in error.do


def test_a_process_that_ended_without_a_word_is_named_with_how() -> None:
    log = "[2026-11-22 10:00:01] INFO: ready\nno licence for this kernel\n"
    error = ended("sglang", "the server", "exited with status 0", "after it was ready", log, "", process="scheduler")
    how = 'its process scheduler exited with status 0, after it wrote "no licence for this kernel".'
    assert error.found == f"the server failed after it was ready: {how}"
    assert error.cause == "exit"
    assert error.details.startswith("Its process scheduler exited with status 0 after it was ready.")


def test_a_kill_while_the_system_ran_out_of_memory_is_said_to_be_that() -> None:
    logs = {"the server was killed": "silent", "its scheduler was killed": "scheduler_killed"}
    for said, name in logs.items():
        log = (LOGS / f"{name}.log").read_text()
        error = ended("sglang", "the server", "was killed by SIGKILL", "after it was ready", log, "", out_of_memory=True)
        assert "the system ran out of memory and killed it" in error.found, said
        assert (error.cause, "dmesg" in error.do) == ("out-of-memory", False)
    log = (LOGS / "gpu_memory.log").read_text()
    error = ended("sglang", "the server", "was killed by SIGKILL", "after it was ready", log, "", out_of_memory=True)
    assert error.cause == "gpu-memory", "what it said itself counts more"


def test_an_exception_that_was_survived_is_not_the_cause_of_a_later_one() -> None:
    survived = "Traceback (most recent call last):\n  File\nModuleNotFoundError: No module named 'optional'\n[2026-11-22] next\n"
    assert read(survived + (LOGS / "gpu_memory.log").read_text()).cause == "gpu-memory"
    told = read(survived + (LOGS / "unknown.log").read_text())
    assert (told.cause, told.line[:9]) == ("", "KeyError:")


def test_an_assertion_without_a_message_shows_its_source() -> None:
    frame = '  File "/x/pool.py", line 7, in allocate'
    log = f"Traceback (most recent call last):\n{frame}\n    assert page_size == 1\n           ^^^^\nAssertionError\n"
    assert read(log).line == "AssertionError: assert page_size == 1"
