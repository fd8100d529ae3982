"""Which runs can be resumed, from their plans."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

from assay.evals.tiny_model.families import tiny_model
from assay.harness.config import RunSpec
from assay.harness.engines.model import TINY_MODEL
from assay.harness.errors import UsageError
from assay.harness.evidence.fingerprint import PARTS, Fingerprint
from assay.harness.evidence.folder import RunFolder
from assay.harness.run.plan import prepare
from assay.harness.run.run_folder import _resuming, open_folder
from assay.harness.run.servers import record_fingerprint
from assay.harness.sides import Side

KERNEL = "def forward(call):\n    return call.q\n"


@pytest.fixture
def kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of a kernel."""
    file = tmp_path / "changing_kernel.py"
    file.write_text(KERNEL)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "changing_kernel", raising=False)
    return file


def opened(path: Path) -> RunFolder:
    spec = RunSpec.of(reference="torch_native", candidate="changing_kernel:forward", questions=4, suites=("accuracy",))
    return open_folder(prepare(spec), path)


def test_a_run_of_a_kernel_that_changed_is_not_resumed(kernel: Path, tmp_path: Path) -> None:
    opened(tmp_path / "run")
    opened(tmp_path / "run")
    kernel.write_text("def forward(call):\n    raise RuntimeError\n")
    with pytest.raises(UsageError, match=r"the candidate's kernel changed \(module changing_kernel\)"):
        opened(tmp_path / "run")


def test_a_run_records_no_secret_that_was_given(kernel: Path, tmp_path: Path) -> None:
    sides = [
        Side(backend=name, flags=(f"--ssl-keyfile-password={value}",), environment={"HF_TOKEN": value})
        for name, value in (("torch_native", "hunter2"), ("changing_kernel:forward", "hunter3"))
    ]
    spec = RunSpec.of(reference=sides[0], candidate=sides[1], questions=4, suites=("accuracy",))
    folder = open_folder(prepare(spec), tmp_path / "run")
    assert not [path for path in folder.path.rglob("*") if path.is_file() and b"hunter" in path.read_bytes()]
    assert folder.manifest().command.count("--ssl-keyfile-password=***") == 2
    folder = open_folder(prepare(spec), tmp_path / "run")  # is resumed
    made = Fingerprint(source="server", engine="e", model=str(TINY_MODEL))
    engine = type("Told", (), {"fingerprint": lambda self: made})()
    written = record_fingerprint(engine, sides[0], folder.server_folder("reference"), folder.nonce)
    assert written is not None
    assert written.asked["--ssl-keyfile-password"] == written.asked["environment.HF_TOKEN"] == "***"


@pytest.mark.parametrize(
    ("family", "backend", "ignored"),
    [
        ("", "torch_native", ()),
        ("gemma2", "torch_native", None),  # it asks for a cap and a window
        ("gemma2", "changing_kernel:forward", ("softcap", "window")),
    ],
)
def test_a_server_says_what_is_ignored_or_why_that_is_not_known(
    kernel: Path, tmp_path: Path, family: str, backend: str, ignored: tuple[str, ...] | None
) -> None:
    model = tiny_model(family) if family else TINY_MODEL
    made = Fingerprint(source="server", engine="e", model=str(model), packages={}, not_observed={"tokens": "no answer"})
    engine = type("Told", (), {"fingerprint": lambda self: made})()
    written = record_fingerprint(engine, Side(backend=backend), tmp_path / "server", "a-run")
    assert written is not None
    assert (written.ignored is None) == (ignored is None)
    for feature, says in zip(ignored or (), written.ignored or (), strict=True):
        assert says.startswith(f"{backend} does not declare the {feature} that the model asks for")
    assert written.not_observed.keys() == {part for part in PARTS if not written.has(part)}
    assert written.not_observed["tokens"] == "no answer"
    assert ("without a server next to it" in written.not_observed.get("ignored", "")) == (ignored is None)


def test_the_commands_of_a_run_hold_no_path_of_its_host(kernel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    model = Path(shutil.copytree(TINY_MODEL, tmp_path / "models" / "m"))
    (tmp_path / "repo").mkdir()
    monkeypatch.chdir(tmp_path / "repo")
    spec = RunSpec.of(
        reference="torch_native", candidate="changing_kernel:forward", model=str(model), questions=4, suites=("accuracy",)
    )
    below = open_folder(prepare(spec), tmp_path / "repo" / "runs" / "1")
    beside = open_folder(prepare(spec), tmp_path / "elsewhere")
    assert "'--model=~/models/m'" in below.manifest().command
    assert _resuming(below).endswith(" --out=runs/1")
    assert _resuming(beside).endswith(" --out='~/elsewhere'")
    assert str(tmp_path) not in _resuming(below) + _resuming(beside)
    repeated = RunSpec.of(
        reference="torch_native", candidate="changing_kernel:forward", model="~/models/m", questions=4, suites=("accuracy",)
    )
    assert prepare(repeated).model == model, "assay expands what it writes"


@pytest.mark.parametrize(
    ("asked", "noise"),
    [
        ({"candidate_arg": ("--kv-cache-dtype=fp8_e4m3",)}, {"reference": "", "candidate": "fp8_kv"}),
        ({"candidate_arg": ("--kv-cache-dtype", "fp8_e5m2")}, {"reference": "", "candidate": "fp8_e5m2_kv"}),
        ({"engine_arg": ("--kv-cache-dtype=fp8_e4m3",), "candidate": "triton"}, {"reference": "", "candidate": ""}),
        ({"candidate_arg": ("--page-size=16",)}, {"reference": "", "candidate": ""}),
    ],
)
def test_a_flag_that_stores_in_fewer_bits_declares_its_noise(
    asked: dict[str, object], noise: dict[str, str], tmp_path: Path
) -> None:
    spec = RunSpec.of(reference="torch_native", questions=4, suites=("accuracy",), **asked)
    assert open_folder(prepare(spec), tmp_path / "run").manifest().noise == noise
