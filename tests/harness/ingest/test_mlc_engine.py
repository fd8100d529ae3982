"""The reader of MLC-LLM engine traces, on an excerpt of a real one, whole and damaged.

What it counts is compared with counts by regular expressions, which share no code with it.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from assay.harness.ingest import mlc_engine
from assay.harness.ingest.mlc_engine import tokens
from assay.harness.ingest.mlc_trace import StepTrace
from assay.harness.ingest.source_file import SourceFile

DATA = Path(__file__).parents[2] / "data" / "traces" / "mlc_engine.txt"
TEXT = DATA.read_text()


def read(tmp_path: Path, data: bytes | str) -> StepTrace:
    path = tmp_path / "trace.txt"
    path.write_bytes(data if isinstance(data, bytes) else data.encode())
    return mlc_engine.READER.steps(SourceFile.of(path))


def test_the_excerpt_is_understood_to_the_last_line() -> None:
    document = mlc_engine.READER.read(SourceFile.of(DATA))
    assert (document.file.lines, document.file.read, document.file.unread) == (147, 147, 0)
    assert document.findings == ()
    facts = {fact.id: fact for fact in document.facts}
    assert facts["requests"].text == "2 requests"
    assert facts["request-1-segments"].text == "4 segments: 3 with a decode, 1 idle, the last one"
    assert facts["request-2-tokens"].text == "4 tokens: 1 from the prefill, 3 from decodes"
    assert facts["request-1-sequence"].cites[0].text == "[engine debug] kv_cache_add_sequence_func_"
    fork = facts["request-2-sequence"]
    assert "with a cached prefix" in fork.text
    assert TEXT.splitlines()[fork.cites[0].first - 1].endswith("kv_cache_fork_sequence_func_")
    assert facts["request-1-output"].text.startswith("Can you introduce yourself?I'd be happy")
    assert facts["request-1-output"].text.count("\n") == 4
    assert [(one.first, one.last) for one in facts["request-1-output"].cites] == [(75, 79)]
    assert facts["request-2-output"].text.endswith("3. **Course")


def test_a_line_that_no_rule_knows_is_counted_and_quoted(tmp_path: Path) -> None:
    lines = TEXT.splitlines()
    lines.insert(40, "[engine debug] teleport_func_")
    lines.insert(60, "something else")
    file = read(tmp_path, "\n".join(lines)).file
    assert (file.read, file.unread) == (147, 2)
    assert [(one.first, one.text) for one in file.excerpts] == [(41, "[engine debug] teleport_func_"), (61, "something else")]


def test_an_answer_ends_where_the_engine_writes(tmp_path: Path) -> None:
    text = "[engine debug] ***Add Request***\nMLC-LLM Output: one\ntwo\n[engine debug] nonsense\nthree\n"
    found = read(tmp_path, text)
    assert found.tracks[0].output == "one\ntwo\nthree"
    assert found.file.unread == 1


def agrees(found: StepTrace, text: str) -> None:
    """What must hold of any file, by regular expressions."""
    lines = text.split("\n")
    lines = lines[:-1] if lines[-1] == "" else lines
    assert found.file.lines == len(lines)
    assert found.file.read + found.file.unread == len(lines)
    assert len(found.tracks) == sum(line == "[engine debug] ***Add Request***" for line in lines)
    sampled = sum(line == "[engine debug] gpu_multinomial_from_uniform_func_" for line in lines)
    before = next((i for i, line in enumerate(lines) if "***Add Request***" in line), len(lines))
    outside = sum("gpu_multinomial_from_uniform_func_" in line for line in lines[:before])
    reloaded = "***Reload engine***" in "".join(lines[before:])
    assert reloaded or sum(sum(tokens(track)) for track in found.tracks) == sampled - outside
    polled = sum(step.kind == "action" for segment in found.segments for step in segment.steps)
    assert polled == sum("[engine debug] ACTION - " in line for line in lines)


@pytest.mark.parametrize("seed", range(40))
def test_a_damaged_trace_is_neither_a_crash_nor_a_wrong_count(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    lines = TEXT.splitlines()
    damage = seed % 4
    if damage == 0:
        lines = TEXT[: rng.randrange(len(TEXT))].splitlines()
        lines = lines[:-1]  # half a line may or may not be one that a rule knows
    elif damage == 1:
        other = iter(TEXT.splitlines())
        lines = [line for one in lines for line in ([one, next(other)] if rng.random() < 0.5 else [one])]
    elif damage == 2:
        for _ in range(rng.randrange(1, 30)):
            del lines[rng.randrange(len(lines))]
    else:
        for _ in range(rng.randrange(1, 30)):
            lines.insert(rng.randrange(len(lines)), lines[rng.randrange(len(lines))])
    text = "".join(f"{line}\n" for line in lines)
    agrees(read(tmp_path, text), text)
    mlc_engine.READER.read(SourceFile.of(tmp_path / "trace.txt"))


def test_every_prefix_is_read(tmp_path: Path) -> None:
    for length in range(0, len(TEXT), 97):
        found = read(tmp_path, TEXT[:length])
        assert found.file.read + found.file.unread == found.file.lines
    assert "trace-cut-off" in {one.rule for one in read(tmp_path, TEXT[:2500]).violations}


def test_other_files_are_not_taken(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text("INFO: started\n" * 50)
    assert not mlc_engine.READER.recognises(SourceFile.of(path))
    assert mlc_engine.READER.recognises(SourceFile.of(DATA))
