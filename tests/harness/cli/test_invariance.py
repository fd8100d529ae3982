"""``assay invariance`` on the command line: what is refused before anything starts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("--singles", "--exactly"), "--singles and --exactly were both given."),
        (("--features", "prefix-cach"), "did you mean 'prefix-cache'?"),
        (("--features", "hicache"), "hicache cannot be switched here: not on cpu: it copies with CUDA."),
        (("--exactly",), "--exactly: nothing cannot be on together."),
        (("--reference", "http://127.0.0.1:1"), "is the URL"),
        (("--minutes", "-1"), "--minutes"),
    ],
)
def test_wrong_use(
    call: Callable[..., int], capsys: pytest.CaptureFixture[str], tmp_path: Path, flags: tuple[str, ...], says: str
) -> None:
    assert call("invariance", *flags, "--out", str(tmp_path / "out")) == 2
    assert says in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "out").exists()
