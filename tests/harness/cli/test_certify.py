from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from assay.harness.evidence.certificate import read_certificate

COMMAND = ("certify", "--device", "cpu")
"""What `call` begins with."""
KERNELS = """
from assay import declares
from assay.harness.bugs.faults import rounded_oracle


@declares(phases=("decode",), dtypes=("float32",), head_dims=(64,))
def decodes(call):
    return rounded_oracle(call)


@declares(phases=("decode",), dtypes=("float32",), head_dims=(64,))
def wrong(call):
    return 2 * rounded_oracle(call)
"""


@pytest.fixture(autouse=True)
def _kernels(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "certified_kernels.py").write_text(KERNELS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])


@pytest.mark.usefixtures("thin_matrix")
def test_faults_are_seeded_in_the_kernel_that_is_named(call: Callable[..., int], tmp_path: Path) -> None:
    chosen = [word for id in ("last-block-lost-16", "honest-candidate") for word in ("--fault", id)]
    assert call("--candidate", "certified_kernels:decodes", *chosen, "--out", "out") == 0
    made = read_certificate(tmp_path / "out" / "certificate.json")
    assert (made.envelope.candidate, made.envelope.phases) == ("certified_kernels:decodes", ("decode",))
    assert made.envelope.dtypes == ("float32",)
    outcomes = {examined.id: examined.outcome for examined in made.examined}
    assert outcomes == {"last-block-lost-16": "caught", "honest-candidate": "quiet"}


@pytest.mark.usefixtures("thin_matrix")
def test_a_candidate_that_is_wrong_without_a_fault_fails(call: Callable[..., int]) -> None:
    assert call("--candidate", "certified_kernels:wrong", "--fault", "honest-candidate", "--out", "out") == 1


@pytest.mark.parametrize("level", ["op", "server"])
@pytest.mark.parametrize("candidate", ["triton", "http://localhost:1", "certified_kernels:missing"])
def test_a_candidate_that_is_no_kernel_is_a_usage_error(
    call: Callable[..., int], capsys: pytest.CaptureFixture[str], candidate: str, level: str, tmp_path: Path
) -> None:
    assert call("--candidate", candidate, "--level", level, "--fault", "identity", "--out", "out") == 2
    error = capsys.readouterr().err
    assert candidate in error
    assert "What to do" in error
    assert not (tmp_path / "out").exists(), "nothing was started"


@pytest.mark.slow
def test_kernels_are_read_only_at_the_op_level_and_where_it_was_asked_for(
    call: Callable[..., int], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    one = ("--candidate", "certified_kernels:decodes", "--fault", "last-block-lost-16", "--out", "out")
    assert call(*one, "--level", "server", "--read-out") == 2
    assert "--read-out was given with --level server" in capsys.readouterr().err
    assert call(*one, "--read-out") == 0
    made = read_certificate(tmp_path / "out" / "certificate.json")
    assert made.envelope.read_out
    assert made.examined[0].read
    assert made.examined[0].read in (tmp_path / "out" / "certificate.md").read_text()
    assert call(*one) == 0
    again = read_certificate(tmp_path / "out" / "certificate.json")
    assert (again.envelope.read_out, again.examined[0].read) == (False, None)
