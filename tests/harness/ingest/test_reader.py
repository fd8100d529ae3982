from __future__ import annotations

import pytest

from assay.harness.ingest.sglang_facts import Log, differing_arguments, parse_arguments
from assay.harness.ingest.sglang_reader import read_log
from assay.harness.tracebacks import Frame

STAMP = "[2026-01-24 18:15:48] "


def read(*lines: str) -> Log:
    return read_log(enumerate(lines, 1))


@pytest.mark.parametrize(
    "line",
    [
        STAMP + "Prefill batch, #new-seq: 1, #new-token: 41, #cached-token: 7",  # cut off: it may have been 77
        STAMP + "Decode batch, #running-req: 3",
        "[METRIC] mmlu_score=0.12\0",
        "[METRIC] mmlu_score=",
        STAMP + 'INFO:     127.0.0.1:1 - "POST /v1/chat/completions HT',
        STAMP + "server_args=ServerArgs(attention_backend='tri",
        "{'score': np.float64(0.1",
        "{'score': np.float64(0.1), and 'other': 0.2}",
    ],
)
def test_a_line_that_begins_like_a_fact_but_is_cut_off_is_counted_as_unread(line: str) -> None:
    log = read(line)
    assert (log.lines, log.read) == (1, 0)
    assert [(one.first, one.text) for one in log.unread] == [(1, line)]
    assert not log.metrics
    assert not any(server.prefills.count or server.decodes.count for server in log.servers)


@pytest.mark.parametrize(
    "line", ["something that nobody knows", STAMP + "Something about frobnication", "    an indented line", "ValueError: no"]
)
def test_a_line_without_a_fact_changes_nothing(line: str) -> None:
    log = read(line)
    assert (log.lines, log.read, log.servers, log.metrics, log.notices, log.traces) == (1, 1, [], [], {}, [])


# Lines as other versions and machines write them: SGLang's issues and pull requests 30047, 36081, 22166, 7227, 1751 and 4058.
@pytest.mark.parametrize(
    ("line", "kind"),
    [
        (
            "[2026-07-04 05:01:20 TP0] Prefill batch, #new-seq: 1, #new-token: 128, #cached-token: 70016, full token usage: 0.28, "
            "mamba usage: 0.20, #running-req: 1, #queue-req: 0, #pending-token: 0, npu graph: False, "
            "input throughput (token/s): 16.23",
            "prefills",
        ),
        (
            "[2026-08-23 09:05:37 TP0 EP0] Decode batch, #running-req: 1, #full token: 165376, full token usage: 0.02, #swa token: "
            "768, swa token usage: 0.00, accept len: 5.30, accept rate: 0.86, cuda graph: True, gen throughput (token/s): 167.04, "
            "#queue-req: 0",
            "decodes",
        ),
        (
            STAMP
            + "Prefill batch. #new-seq: 1, #new-token: 7, #cached-token: 0, token usage: 0.00, #running-req: 0, #queue-req: 0, ",
            "prefills",
        ),
        ("[2024-10-22 06:31:49 TP0] Traceback (most recent call last):", ""),
        ("[2025-06-19 15:12:27] Scheduler hit an exception: Traceback (most recent call last):", "crash"),
        ("[2025-03-04 00:24:49 TP0] sglang is using nccl==2.21.5", ""),
        (STAMP + "Using fallback token IDs for x", ""),
        (STAMP + "CUDA video decoding failed, falling back to CPU.", "fallback"),
        (STAMP + "Using x, since y is missing; falling back.", "fallback"),
        (STAMP + "Receive: obj=GenerateReqInput(text='[METRIC] a=1')", ""),
        (STAMP + "Ignore import error when loading sglang.srt.models.x: ", ""),
    ],
)
def test_lines_of_other_versions_are_read(line: str, kind: str) -> None:
    log = read(line)
    counted = [getattr(server, kind).count for server in log.servers]
    assert (log.read, counted or [noted for noted, _ in log.notices]) == (1, [1] if counted else [kind] if kind else [])


def test_a_prefix_is_cached_if_each_sequence_has_16_tokens_of_it() -> None:
    batch = (
        STAMP + "Prefill batch, #new-seq: 2, #new-token: 7, #cached-token: {}, token usage: 0.00, #running-req: 0, #queue-req: 0, "
    )
    log = read(batch.format(31), batch.format(32))
    assert (log.servers[0].prefills.count, log.servers[0].prefix_batches.count) == (2, 1)


def test_outcomes_of_several_open_tests_are_counted_and_given_to_none() -> None:
    log = read("a/test_x.py::test_one ", "a/test_x.py::test_two ", "FAILED", "PASSED")
    assert log.outcomes == {"failed": 1, "passed": 1}
    assert [one.outcome for one in log.tests] == ["", ""]


def test_time_that_goes_back_is_seen() -> None:
    ready = "The server is fired up and ready to roll!"
    log = read(f"[2026-01-24 18:15:48] {ready}", f"[2026-01-24 18:15:47] {ready}", f"[2026-01-24 18:15:01] {ready}")
    assert (log.disordered.count, log.disordered.first) == (1, 3)


def test_a_traceback_survives_lines_of_other_writers() -> None:
    log = read(
        "Traceback (most recent call last):",
        '  File "/x/a.py", line 3, in run',
        STAMP + "The server is fired up and ready to roll!",
        "    return fn()",
        "mod.OddError: what now",
        "mod.OddError: again",
    )
    assert [trace.exception for trace, _ in log.traces] == ["mod.OddError: what now"]


def test_unittest_output_is_read() -> None:
    log = read(
        "test_mmlu (__main__.TestX) ... FAIL", "test_a (__main__.TestX) ... ok", "Ran 2 tests in 3.100s", "[METRIC] mmlu_score=0.5"
    )
    assert log.read == 4
    assert [one.outcome for one in log.tests] == ["failed", "passed"]


PYTEST = """============================= test session starts ==============================
platform linux -- Python 3.11.7, pytest-9.0.1, pluggy-1.6.0
collected 2 items

test_eval.py::test_mmlu FAILED                                           [ 50%]
test_eval.py::test_latency PASSED                                        [100%]

=================================== FAILURES ===================================
__________________________________ test_mmlu ___________________________________

    def test_mmlu():
        score = 0.125
>       assert score >= 0.6
E       assert 0.125 >= 0.6

test_eval.py:3: AssertionError
=========================== short test summary info ============================
FAILED test_eval.py::test_mmlu - assert 0.125 >= 0.6
========================= 1 failed, 1 passed in 0.02s ==========================
"""


def test_a_failure_of_pytest_says_why() -> None:
    log = read(*PYTEST.splitlines())
    ((trace, test),) = log.traces
    assert trace.exception == "AssertionError: assert 0.125 >= 0.6"
    assert trace.frames == [Frame("test_eval.py", 3)]
    assert log.tests[test].id == "test_eval.py::test_mmlu"


@pytest.mark.parametrize(
    ("text", "arguments", "whole"),
    [
        (
            "a='x, y', b=[1, 2], c={}, d=None, e=-1.5, f=(1, 'z)'), g=\"it's\", h=<Kind.A: 0>, i='')",
            {"a": "'x, y'", "b": "[1, 2]", "c": "{}", "d": "None", "e": "-1.5", "f": "(1, 'z)')", "g": '"it\'s"',
             "h": "<Kind.A: 0>", "i": "''"},
            True,
        ),
        ("'a': 'x', 'b': [1, 2]}", {"a": "'x'", "b": "[1, 2]"}, True),
        ("a=1, b=[1, 2], c='abc", {"a": "1", "b": "[1, 2]"}, False),
        ("a=1) and more", {"a": "1"}, False),
        ("a=" + "[" * 10_000, {}, False),
        ("", {}, False),
    ],
    ids=["written", "dict", "cut", "more", "deep", "empty"],
)  # fmt: skip
def test_arguments_stay_as_they_are_written(text: str, arguments: dict[str, str], whole: bool) -> None:
    assert parse_arguments(text) == (arguments, whole)


def test_differences_leave_out_what_differs_anyway() -> None:
    servers = [{"a": "1", "port": "1"}, {"a": "2", "port": "2"}, {"a": "2", "port": "3", "b": "0"}]
    assert differing_arguments(servers) == [("a", ("1", "2", "2")), ("b", ("not stated", "not stated", "0"))]
    assert differing_arguments([]) == []


def test_a_summary_and_durations_tell_of_tests_whose_failure_is_not_shown() -> None:
    log = read(
        "t.py::test_a [2026-01-24 18:15:48] The server is fired up and ready to roll!",
        "============================= slowest 2 durations =============================",
        "99.12s call     t.py::test_a",
        "1.00s setup    t.py::test_a",
        "=========================== short test summary info ============================",
        "FAILED t.py::test_a - ValueError: no",
        "========================= 1 failed in 100.02s (0:01:40) ==========================",
    )
    (test,) = log.tests
    assert (log.read, test.outcome, test.outcome_line) == (7, "failed", 6)
    assert [(trace.exception, at) for trace, at in log.traces] == [("ValueError: no", 0)]
