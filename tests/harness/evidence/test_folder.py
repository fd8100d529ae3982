from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from assay.harness.errors import EngineError, EvidenceError, UsageError
from assay.harness.evidence import jsonl
from assay.harness.evidence.counters import Admission
from assay.harness.evidence.folder import RunFolder
from assay.harness.evidence.manifest import FailureResult, Manifest, Progress, hash_items
from assay.harness.evidence.records import Answer, Item

BATCHES = (("rid-0", "rid-1"), ("rid-0",))
ITEMS = [Item(suite="accuracy", id=f"q{i}", prompt=f"prompt {i}", prompt_hash="h", expected="A") for i in range(3)]


def manifest(**changes: object) -> Manifest:
    fields = {
        "run_id": "r", "nonce": "n", "created": "2026-01-01T00:00:00Z", "command": "assay run", "packages": {"torch": "2"},
        "spec": {"candidate": {"backend": "mine"}, "workload": {"concurrency": 32}}, "hardware": "h", "python": "3", "git": "",
        "model": "m", "model_hashes": {"reference": "1", "candidate": "1"}, "items_hash": hash_items(ITEMS),
    }  # fmt: skip
    return Manifest(**{**fields, **changes})


def answer(item: str, request: str = "") -> Answer:
    return Answer(
        suite="accuracy", role="candidate", item=item, prompt_hash="h", request_id=request, text="Answer: A",
        parsed="A", finish_reason="stop", prompt_tokens=9, completion_tokens=3, cached_tokens=1, latency_s=0.1,
    )  # fmt: skip


def test_answers_have_the_size_of_the_batch_that_admitted_them(tmp_path: Path) -> None:
    folder = RunFolder.open(tmp_path / "run", manifest(), ITEMS)
    folder.append(answer("q0", "rid-0"))
    folder.append(answer("q1", "rid-1"))
    folder.append(answer("q2", "rid-unseen"))
    served = folder.server_folder("candidate")
    served.mkdir(parents=True)
    # The second line is a later chunk of rid-0; the third was cut off when the server was killed.
    admitted = [Admission(run="n", process=1, rids=rids, new=(1,) * len(rids), prefix=(0,) * len(rids)) for rids in BATCHES]
    (served / "admissions.jsonl").write_text(jsonl.lines_of(admitted) + '{"run": "n", "rids": ["rid-')
    assert [a.batch_size for a in folder.answers()] == [2, 2, None]
    assert folder.items() == ITEMS


def test_a_killed_run_is_resumed(tmp_path: Path) -> None:
    path = tmp_path / "run"
    folder = RunFolder.open(path, manifest(), ITEMS)
    folder.append(answer("q0"))
    folder.update(Progress(seconds=3, failure=FailureResult.of("engine", EngineError("died"))))
    with (path / "records.jsonl").open("a") as file:
        file.write('{"suite": "accuracy", "ro')  # killed in the middle of a line
    again = RunFolder.open(path, manifest(spec={"candidate": {"backend": "mine"}, "workload": {"concurrency": 8}}), ITEMS)
    again.append(answer("q1"))
    assert [a.item for a in again.answers()] == ["q0", "q1"]
    assert again.progress() == Progress(run="n", seconds=3)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (
            {"spec": {"candidate": {"backend": "other"}, "workload": {"concurrency": 32}}},
            "candidate backend was 'mine', now 'other'",
        ),
        ({"model_hashes": {"reference": "1", "candidate": "2"}}, "model's files changed"),
        ({"items_hash": "2"}, "questions changed"),
        ({"packages": {"torch": "3"}}, "packages changed"),
        ({"hardware": "another machine"}, "hardware changed"),
    ],
)
def test_a_different_run_is_not_resumed(tmp_path: Path, changes: dict[str, object], says: str) -> None:
    RunFolder.open(tmp_path / "run", manifest(), ITEMS)
    with pytest.raises(UsageError, match=says):
        RunFolder.open(tmp_path / "run", manifest(**changes), ITEMS)


def test_a_folder_of_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("x")
    with pytest.raises(UsageError, match="is not the folder of a run"):
        RunFolder.open(tmp_path, manifest(), ITEMS)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["thesis.tex"]


def test_a_damaged_record_is_named_by_its_line_and_a_full_disk_by_its_file(tmp_path: Path) -> None:
    folder = RunFolder.open(tmp_path / "run", manifest(), ITEMS)
    folder.append(answer("q0"))
    records = tmp_path / "run" / "records.jsonl"
    records.write_text(records.read_text() + '{"suite": 7}\n')
    with pytest.raises(EvidenceError, match="line 2 is damaged"):
        folder.answers()
    records.unlink()
    os.symlink("/dev/full", records)
    with pytest.raises(EvidenceError, match="No space left"):
        folder.append(answer("q0"))


def test_answers_are_read_back_whatever_a_model_writes(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    tokens = [{"text": "\ud83d", "logprob": math.nan, "top": [["\ud83d", -1]]}]
    odd = Answer(**answer("q0").model_dump() | {"text": "a\u2028b\u0085c\x0bd\ne half \ud83d", "tokens": tokens})
    jsonl.append(path, [odd, odd])
    first, second = jsonl.read(path, Answer)
    assert first.text == second.text == "a\u2028b\u0085c\x0bd\ne half ?"
    assert (first.tokens[0].text, first.tokens[0].top) == ("?", (("?", -1.0),))
    assert math.isnan(first.tokens[0].logprob)


HOLDER = """
import sys, time
from pathlib import Path
from assay.harness.files import lock_folder
lock = lock_folder(Path(sys.argv[1]))
print("locked", flush=True)
time.sleep(60)
"""


@pytest.fixture
def another_run(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that writes to the folder ``run``."""
    command = [sys.executable, "-c", HOLDER, str(tmp_path / "run")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "locked\n"
        yield process
        process.kill()


def test_a_folder_belongs_to_one_process_until_that_has_ended(tmp_path: Path, another_run: subprocess.Popen[str]) -> None:
    with pytest.raises(UsageError, match=f"in use by another run \\(process {another_run.pid}\\)"):
        RunFolder.open(tmp_path / "run", manifest(), ITEMS)
    another_run.kill()
    another_run.wait()
    RunFolder.open(tmp_path / "run", manifest(), ITEMS)


@pytest.mark.parametrize("fails_at", [1, 2])
def test_a_run_whose_disk_was_full_while_it_was_made_can_be_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails_at: int
) -> None:
    replaced: list[Path] = []

    def replace_until_full(old: Path, new: Path) -> None:
        replaced.append(new)
        if len(replaced) >= fails_at:
            raise OSError(28, "No space left on device")
        Path(old).rename(new)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", replace_until_full)
        with pytest.raises(EvidenceError, match="No space left"):
            RunFolder.open(tmp_path / "run", manifest(), ITEMS)
    folder = RunFolder.open(tmp_path / "run", manifest(), ITEMS)
    assert folder.items() == ITEMS


def test_files_that_a_killed_run_was_writing_are_removed_when_it_is_resumed(tmp_path: Path) -> None:
    folder = RunFolder.open(tmp_path / "run", manifest(), ITEMS)
    unfinished = [folder.path / ".progress.json.1.part", folder.server_folder("candidate") / ".x.json.2.part"]
    for path in unfinished:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("{")
    RunFolder.open(tmp_path / "run", manifest(), ITEMS)
    assert not any(path.exists() for path in unfinished)
