"""A real CPU server in an interpreter without assay, with a package laid over it, loads the plugin of the assay that runs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from assay.harness.config import RunSpec
from assay.harness.engines.base import ChatRequest, answers
from assay.harness.engines.environments import interpreter
from assay.harness.run.plan import prepare
from assay.harness.run.preflight import check_environment
from assay.harness.run.servers import core_of, make_engine, running

pytestmark = [pytest.mark.server, pytest.mark.slow]


def without_assay(folder: Path) -> str:
    """Make an environment that has everything of this one but assay."""
    here = interpreter("")
    subprocess.run([here.base, "-m", "venv", "--without-pip", folder], check=True)
    (place,) = folder.glob("lib/python*/site-packages")
    for parent in map(Path, here.places):
        for each in parent.iterdir():
            if "assay" not in each.name and not (place / each.name).exists():
                (place / each.name).symlink_to(each)
    return str(folder / "bin" / "python")


def test_a_server_is_instrumented_in_an_interpreter_without_assay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("PYTHONPATH", raising=False)
    monkeypatch.chdir(tmp_path)
    bare = without_assay(tmp_path / "bare")
    assert subprocess.run([bare, "-c", "import assay"], capture_output=True, check=False).returncode
    version = interpreter("").version_of("einops")
    asked = f"einops @ {sys.executable}"
    spec = RunSpec.of(reference="torch_native", candidate_python=bare, candidate_with=(asked,), questions=8)
    said: list[str] = []
    plan = prepare(spec)
    check_environment(plan, said.append)
    assert len(said) == 1
    evidence = tmp_path / "server"
    engine = make_engine(plan, "candidate", evidence, tmp_path / "log", cpu_core=core_of("cpu"), eager=True)
    with running([engine], "cpu"):
        assert answers(engine, [ChatRequest("What is 1 + 1?", 4)], 1)[0].text
        fingerprint = engine.fingerprint()
    assert str(tmp_path / "cache/assay/environments") in engine.launch_command
    assert fingerprint is not None
    assert fingerprint.weights
    assert fingerprint.packages is not None
    assert fingerprint.packages["sglang"] == interpreter("").version_of("sglang")
    assert version
    assert list((evidence / "counters").iterdir())
