"""Bad input to ``assay bench`` ends with a sentence and exit code 2; nothing is started."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from assay.harness import cli
from assay.harness.cli.bench import again


def call(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["assay", "bench", *arguments])
    with pytest.raises(SystemExit) as exit_:
        cli.main()
    return int(exit_.value.code or 0)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--candidate", "sage_atn"], "did you mean 'sage_attn'?"),
        (["--bound", "0.5"], "--latency-bound is 0.5"),
        (["--shapes", "shot"], "shot is not a shape"),
        (["--shapes", "9000:64"], "9000 + 64 tokens, and the model takes 4096"),
        (["--concurrency", "0"], "--latency-concurrency"),
        (["--seconds", "0"], "--latency-seconds"),
        (["--engine-arg=--port=1"], "assay sets itself"),
        (["--out", "full"], "full is not empty"),
        (["--bound", "2", "kernel", "full", "--candidate", "sage_attn"], "--bound before kernel"),
        (["kernel", "full", "--candidate", "sage_attn"], "full is not a replay pack"),
    ],
)
def test_wrong_use(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    arguments: list[str],
    says: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.tex").write_text("x")
    assert call(monkeypatch, *arguments) == 2
    assert says in " ".join(capsys.readouterr().err.split())
    assert [path.name for path in (tmp_path / "full").iterdir()] == ["thesis.tex"]


def test_the_command_that_repeats_a_bench_names_no_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        sys, "argv", ["assay", "bench", "--out", "a b", "--candidate", "x:y", "--out=c", "--seconds", "5"]
    )
    assert again() == "assay bench --candidate x:y --seconds 5"
