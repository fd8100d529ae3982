"""Packages laid over an interpreter's own: they come first, they are made once, and assay is found in an interpreter without it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from assay.harness.engines import environments
from assay.harness.errors import UsageError
from assay.harness.sides import Side, profile_of, treatment, without_secrets
from tests.harness.engines.wheels import wheel

NUMBERS = "import fact, importlib.metadata as m, numpy; print(fact.VALUE, m.version('fact'), numpy.__version__ > '')"


def side(*packages: str | Path, interpreter: str = "") -> Side:
    return Side(backend="torch_native", interpreter=interpreter, packages=tuple(map(str, packages)))


def printed(python: str, code: str, **environment: str) -> str:
    done = subprocess.run([python, "-c", code], env={**os.environ, **environment}, capture_output=True, text=True, check=True)
    return done.stdout.strip()


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, str]:
    """The cache, an environment with fact 1.0, and one with fact 2.0 over it."""
    folder = tmp_path_factory.mktemp("environments")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder))
        first = environments.python_of(side(wheel(folder, "1.0")))
        second = environments.python_of(side(wheel(folder, "2.0"), interpreter=first))
    return folder, first, second


@pytest.fixture(autouse=True)
def cached(monkeypatch: pytest.MonkeyPatch, made: tuple[Path, str, str]) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(made[0]))


def test_a_package_comes_before_its_parents_and_all_else_is_there(made: tuple[Path, str, str]) -> None:
    _, first, second = made
    assert printed(first, NUMBERS) == "1.0 1.0 True"
    assert printed(second, NUMBERS) == "2.0 2.0 True"
    looked = environments.interpreter(second)
    assert looked.version_of("fact") == "2.0"
    assert looked.version[:2] == sys.version_info[:2]
    assert looked.version_of("torch") == environments.interpreter("").version_of("torch") != ""


def test_an_environment_is_made_once_and_again_for_other_content(made: tuple[Path, str, str], tmp_path: Path) -> None:
    folder, first, _ = made
    said: list[str] = []
    assert environments.python_of(side(folder / "fact-1.0-py3-none-any.whl"), said.append) == first
    assert said == []
    # The same version, as that of an engine built from two branches: pip takes it for installed.
    other = environments.python_of(side(wheel(tmp_path, "1.0", "another"), interpreter=first), said.append)
    assert printed(other, NUMBERS).startswith("another 1.0")
    assert len(said) == 1


def test_a_package_is_taken_from_another_environment_without_an_index(made: tuple[Path, str, str]) -> None:
    _, first, second = made
    taken = environments.python_of(side(f"fact @ {second}", interpreter=first))
    assert printed(taken, NUMBERS) == "2.0 2.0 True"
    with pytest.raises(UsageError, match="has no other"):
        environments.python_of(side(f"other @ {second}"))


def test_an_interrupted_environment_is_not_used(
    made: tuple[Path, str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    asked = side(made[0] / "fact-1.0-py3-none-any.whl")

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(environments, "_own", stop)
        with pytest.raises(KeyboardInterrupt):
            environments.python_of(asked)
    assert [path.suffix for path in (tmp_path / "cache/assay/environments").iterdir()] == [".lock"]
    assert printed(environments.python_of(asked), NUMBERS).startswith("1.0")


def test_what_pip_refuses_is_a_usage_error_with_its_last_lines(tmp_path: Path) -> None:
    broken = tmp_path / "broken-1.0-py3-none-any.whl"
    broken.write_bytes(b"no archive")
    with pytest.raises(UsageError, match=r"pip cannot install .*broken") as refused:
        environments.python_of(side(broken))
    assert "broken" in refused.value.found
    assert refused.value.do.startswith("check the names")


def test_a_package_comes_before_what_the_python_path_has(
    made: tuple[Path, str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "fact.py").write_text("VALUE = 0")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    python = environments.python_of(side(wheel(tmp_path, "3.0")))
    assert environments.interpreter(python).version_of("fact") == "3.0"
    path = environments.python_path(python, str(tmp_path))
    assert printed(python, "import fact, assay; print(fact.VALUE)", PYTHONPATH=path) == "3.0"
    # Of another environment, only assay is added.
    assert environments.python_path(sys.executable, "/x") == f"{environments.room()}:/x"


def test_an_interpreter_without_assay_finds_its_plugin_and_nothing_else_of_this_environment(tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    subprocess.run([environments.interpreter("").base, "-m", "venv", "--without-pip", bare], check=True)
    code = (
        "import importlib.metadata as m, importlib.util as u, assay\n"
        "print([e.value for e in m.entry_points(group='sglang.srt.plugins')], assay.__version__, u.find_spec('torch'))"
    )
    path = str(environments.room())
    assert printed(str(bare / "bin/python"), code, PYTHONPATH=path) == (
        "['assay.harness.engines.sglang.plugin:register'] 0.1.0 None"
    )
    with pytest.raises(UsageError, match="lacks numpy, pydantic, safetensors, torch, sglang"):
        environments.check_interpreter(str(bare / "bin/python"), profile_of("sglang"))


def test_an_older_engine_and_a_python_that_does_not_run_are_refused(
    made: tuple[Path, str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONPATH", raising=False)
    old = environments.python_of(side(wheel(tmp_path, "0.5.9", name="sglang")))
    with pytest.raises(UsageError, match=r"sglang 0\.5\.9 of .* is too old: it loads no plugins"):
        environments.check_interpreter(old, profile_of("sglang"))
    with pytest.raises(UsageError, match="does not run"):
        environments.interpreter(str(tmp_path / "no_python"))


def test_packages_are_part_of_the_treatment_and_hide_their_secrets() -> None:
    reference, candidate = side(), side("a==1", "b @ git+https://user:secret@host/b")
    assert treatment(reference, side("a==1", "b")) == {"packages": ("", "a==1, b")}
    assert "secret" not in str(without_secrets(candidate))


def test_an_engine_that_is_missing_here_is_found_in_the_environment_beside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "cpu"))
    vllm = Side(engine="vllm", backend="CPU_ATTN")
    assert environments.python_of(vllm) == ""
    beside = tmp_path / "vllm" / "bin" / "python"
    beside.parent.mkdir(parents=True)
    beside.symlink_to(sys.executable)
    assert environments.python_of(vllm) == str(beside)
    assert environments.python_of(vllm.model_copy(update={"interpreter": "/own/python"})) == "/own/python"
    assert environments.python_of(Side(backend="triton")) == "", "another engine's is not taken"
