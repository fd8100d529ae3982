"""Each rule of the state machine, broken in an excerpt of a real trace, which keeps them all."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from assay.harness.ingest import mlc_trace
from assay.harness.ingest.source_file import SourceFile

LINES = (Path(__file__).parents[2] / "data" / "traces" / "mlc_engine.txt").read_text().splitlines()
E = "[engine debug] "


def without(name: str, which: int = 0) -> Callable[[list[str]], None]:
    def edit(lines: list[str]) -> None:
        del lines[[i for i, line in enumerate(lines) if line.removeprefix(E) == name][which]]

    return edit


def swapped(first: str, second: str, which: int) -> Callable[[list[str]], None]:
    def edit(lines: list[str]) -> None:
        at = [i for i, line in enumerate(lines) if line.removeprefix(E) == first][which]
        other = next(i for i in range(at, len(lines)) if lines[i].removeprefix(E) == second)
        lines[at], lines[other] = lines[other], lines[at]

    return edit


def twice(name: str, which: int) -> Callable[[list[str]], None]:
    def edit(lines: list[str]) -> None:
        at = [i for i, line in enumerate(lines) if line.removeprefix(E) == name][which]
        lines.insert(at, lines[at])

    return edit


def cut(at: int) -> Callable[[list[str]], None]:
    def edit(lines: list[str]) -> None:
        del lines[at:]

    return edit


@pytest.mark.parametrize(
    ("edit", "rule", "where", "says", "places"),
    [
        (without("kv_cache_end_forward_func_", 1), "trace-begin-not-closed", "request 1, segment 1",
         "the forward pass does not end before the next part begins", (35, 39)),
        (without("kv_cache_begin_forward_func_", 1), "trace-end-not-begun", "request 1, segment 1",
         "a forward pass ends that had not begun", (36,)),
        (without("POST_SEGMENT", 0), "trace-begin-not-closed", "request 1, segment 1",
         "the segment does not end before the next part begins", (27, 40)),
        (without("PRE_SEGMENT", 1), "trace-end-not-begun", "request 1", "a segment ends that had not begun", (53,)),
        (without("single_batch_prefill_func_ or single_batch_extend_func_", 0), "trace-decode-before-prefill",
         "request 1, segment 1", "single_batch_decode_func_ is called before any prefill", (14, 35)),
        (without("kv_cache_fork_sequence_func_"), "trace-sequence-count", "request 2",
         "0 sequences were added or forked for the request, where one is expected", (81,)),
        (twice("kv_cache_add_sequence_func_", 0), "trace-sequence-count", "request 1",
         "2 sequences were added or forked for the request, where one is expected", (14, 19, 20)),
        (swapped("ACTION - Batch jump forward", "ACTION - Batch decode", 1), "trace-action-order", "request 1, segment 1",
         "the engine polls Batch decode where Batch jump forward is next", (28, 30)),
        (without("ACTION - Batch decode", 1), "trace-action-order", "request 1, segment 1",
         "single_batch_decode_func_ is called, but the engine is not in Batch decode", (30, 35)),
        (without("ACTION - Batch decode", 4), "trace-action-order", "request 1, segment 4",
         "the engine polls no action after Batch jump forward, which computed nothing", (72, 73)),
        (swapped("softmax_func_", "gpu_multinomial_from_uniform_func_", 1), "trace-call-order", "request 1, segment 1",
         "gpu_multinomial_from_uniform_func_ is called before softmax_func_", (38,)),
        (swapped("embed_func_", "kv_cache_begin_forward_func_", 1), "trace-call-order", "request 1, segment 1",
         "embed_func_ is called inside of a forward pass", (34, 35)),
        (twice("single_batch_decode_func_", 0), "trace-call-order", "request 1, segment 1",
         "single_batch_decode_func_ is the second call of the model in one forward pass", (36, 37)),
        (without("single_batch_decode_func_", 0), "trace-call-order", "request 1, segment 1",
         "the forward pass ends without a call of the model", (35, 36)),
        (cut(36), "trace-cut-off", "request 1, segment 1", "a forward pass that begins here does not end in the file", (35, 36)),
        (cut(40), "trace-cut-off", "request 1", "the request that begins here does not end in the file", (14, 40)),
    ],
)  # fmt: skip
def test_a_broken_rule_is_found_where_it_is_broken(
    tmp_path: Path, edit: Callable[[list[str]], None], rule: str, where: str, says: str, places: tuple[int, ...]
) -> None:
    lines = list(LINES)
    edit(lines)
    path = tmp_path / "trace.txt"
    path.write_text("\n".join(lines))
    found = mlc_trace.READER.steps(SourceFile.of(path))
    first = next(one for one in found.violations if one.rule == rule)
    assert first.where == where
    assert (first.says, first.places) == (says, places)


def test_a_whole_trace_keeps_all_rules(tmp_path: Path) -> None:
    path = tmp_path / "trace.txt"
    path.write_text("\n".join(LINES))
    assert mlc_trace.READER.steps(SourceFile.of(path)).violations == ()


def test_violations_are_counted_beyond_those_that_are_shown(tmp_path: Path) -> None:
    path = tmp_path / "trace.txt"
    path.write_text("\n".join(LINES[:13] + [line for line in LINES[13:80] * 8 if "end_forward" not in line]))
    document = mlc_trace.READER.read(SourceFile.of(path))
    shown = [one for one in document.findings if one.id == "trace-begin-not-closed"]
    assert len(shown) == 5
    assert shown[0].evidence[-1].endswith("places like this in the trace")
