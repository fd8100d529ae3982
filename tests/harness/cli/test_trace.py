from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

TRACES = Path(__file__).parents[2] / "data" / "traces"
ENGINE, FLASH, MATH = TRACES / "mlc_engine.txt", TRACES / "h100_flash.json.gz", TRACES / "h100_math.json.gz"


COMMAND = ("trace",)
"""What `call` begins with."""


def test_show(call: Callable[..., int], capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert call("show", ENGINE, "--html", tmp_path / "trace.html") == 0
    printed = capsys.readouterr().out
    assert "147 of 147 lines read" in printed
    assert "request 2 forks a sequence" in printed
    assert "No rule is broken." in printed
    assert "In order" in (tmp_path / "trace.html").read_text()
    assert call("show", FLASH) == 0
    assert "decode 4, extend 1, other 4" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("edit", "code", "says"),
    [
        (("kv_cache_end_forward_func_", ""), 1, "warning: request 1: The forward pass has no end"),
        (("softmax_func_", "softermax_func_"), 3, "Not read: line 24: [engine debug] softermax_func_"),
    ],
)
def test_show_of_a_trace_that_is_not_in_order(
    call: Callable[..., int], capsys: pytest.CaptureFixture[str], tmp_path: Path, edit: tuple[str, str], code: int, says: str
) -> None:
    text = ENGINE.read_text()
    line = f"[engine debug] {edit[0]}\n"
    if edit[1]:
        text = text.replace(edit[0], edit[1], 1).replace("gpu_multinomial_from_uniform_func_", "gpu_argsort_probs_func_", 1)
    else:
        text = text.replace(line, "", 1)
    (tmp_path / "trace.txt").write_text(text)
    assert call("show", tmp_path / "trace.txt") == code
    assert says in capsys.readouterr().out


def test_diff(call: Callable[..., int], capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert call("diff", ENGINE, ENGINE) == 2, "a trace agrees with itself, which shows nothing"
    again = shutil.copy(ENGINE, tmp_path)
    assert call("diff", ENGINE, again) == 0
    assert "Both traces take the same steps" in capsys.readouterr().out
    assert call("diff", FLASH, MATH, "--html", tmp_path / "diff.html") == 1
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith(
        "DIFFERENT (exit code 1): Device 0 runs pytorch_flash::flash_fwd_kernel (event 577) where the other runs "
    )
    page = (tmp_path / "diff.html").read_text()
    assert "Different" in page
    assert "<svg xmlns" not in page, "a profile has viewers of its own"
    assert call("diff", ENGINE, FLASH) == 3
    assert "cannot be compared" in capsys.readouterr().out


def test_what_is_no_trace(call: Callable[..., int], capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert call("diff", ENGINE, tmp_path / "nowhere") == 2
    assert call("diff", ENGINE) == 2
    assert call("diff", ENGINE, __file__) == 3
    assert "is no trace that assay knows" in capsys.readouterr().err
