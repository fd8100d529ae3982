"""What cannot run is refused before anything starts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from assay.harness.config import make_spec
from assay.harness.engines.model import TINY_MODEL
from assay.harness.errors import ChangedError, UsageError
from assay.harness.evidence.fingerprint import Fingerprint, Tokens
from assay.harness.run.plan import prepare
from assay.harness.run.preflight import GIB, check_accepted, check_environment, check_memory, check_tokens
from assay.harness.run.run import compare_features, run
from assay.harness.sides import Side

SIDE = Side(backend="triton")


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.mark.usefixtures("no_gpu")
@pytest.mark.parametrize(("built", "says"), [(None, "built without CUDA"), ("12.8", "built for CUDA 12.8 and sees none")])
def test_cuda_without_a_gpu_is_a_usage_error(monkeypatch: pytest.MonkeyPatch, built: str | None, says: str) -> None:
    monkeypatch.setattr(torch.version, "cuda", built)
    with pytest.raises(UsageError, match=says) as caught:
        check_environment(prepare(make_spec({"device": "cuda", "candidate": "torch_native"})))
    assert "--device=cpu" in caught.value.do


@pytest.mark.parametrize("name", ["fa3", "flashinfer"])
def test_a_backend_that_needs_a_gpu_is_refused_on_the_cpu(name: str) -> None:
    with pytest.raises(UsageError, match=f"{name} does not run on --device=cpu"):
        check_environment(prepare(make_spec({"device": "cpu", "candidate": name})))


@pytest.mark.usefixtures("no_gpu")
def test_servers_that_run_elsewhere_need_no_gpu_here() -> None:
    there = "http://127.0.0.1:9"
    spec = make_spec({"device": "cuda", "reference": there, "candidate": there, "questions": 8, "suites": ("accuracy",)})
    check_environment(prepare(spec))


def test_a_model_that_does_not_fit_is_refused_by_the_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("assay.harness.engines.memory.available_bytes", lambda device: GIB)
    spec = make_spec({"device": "cpu", "model": str(TINY_MODEL)})
    with pytest.raises(UsageError, match=r"does not fit: a server needs 3\.0 GiB, and 1\.0 GiB is free"):
        run(spec, tmp_path / "run")
    with pytest.raises(UsageError, match="--features: nothing is not a feature"):  # what is wrong with a command comes first
        compare_features(spec, tmp_path / "features", features=("nothing",))


@pytest.mark.parametrize(
    ("device", "weights", "free", "do"),
    [
        ("cuda", 60, 79, "--servers=in-turn --engine-arg=--mem-fraction-static=0.80"),
        ("cuda", 90, 79, "smaller --model"),
        ("cpu", 20, 40, "smaller --model"),
    ],
)
def test_what_helps_follows_from_how_much_is_missing(device: str, weights: int, free: int, do: str) -> None:
    with pytest.raises(UsageError) as caught:
        check_memory(device, SIDE, weights * GIB, free * GIB)
    assert do in caught.value.do


@pytest.mark.parametrize("flag", ["--tp-size=4", "--quantization=fp8", "--load-format=dummy", "--mem-fraction-static=0.85"])
def test_flags_that_change_how_much_is_needed_count(flag: str) -> None:
    check_memory("cuda", SIDE.model_copy(update={"flags": (flag,)}), 60 * GIB, 79 * GIB)


def test_what_is_not_known_refuses_nothing(tmp_path: Path) -> None:
    check_memory("cuda", SIDE, None, GIB)
    check_memory("cuda", SIDE, 60 * GIB, 0)


def served(**packages: str) -> Fingerprint:
    return Fingerprint(source="server", engine="e", model="m", packages=packages, config={"rms_norm_eps": "1e-05"})


def test_a_server_that_is_not_what_was_accepted_is_refused(tmp_path: Path) -> None:
    accepted = tmp_path / "accepted.json"
    accepted.write_text(served(torch="2.12").model_dump_json())
    check_accepted(accepted, served(torch="2.12"))
    with pytest.raises(
        ChangedError, match=r"The candidate \(B\) is not what .* \(A\) accepts: torch is 2\.12 in A, 2\.13 in B; and 1 more"
    ):
        check_accepted(accepted, served(torch="2.13", triton="3"))
    with pytest.raises(ChangedError, match="settings of the model were not compared"):
        check_accepted(accepted, served(torch="2.12").model_copy(update={"config": None}))
    with pytest.raises(ChangedError, match="nothing of it could be compared"):
        check_accepted(accepted, Fingerprint(source="server", engine="e", model="m"))


def test_engines_that_make_other_tokens_are_refused_before_anything_is_scored() -> None:
    def of(**ids: tuple[int, ...]) -> Fingerprint:
        return served().model_copy(update={"tokens": Tokens(bos=len(ids), bare={"a": (1, 2)}, chats=ids)})

    check_tokens(of(hello=(1, 2)), of(hello=(1, 2)))
    check_tokens(of(hello=(1, 2)), served()), "an engine that does not tell them is judged by the report"
    with pytest.raises(ChangedError, match=r"The two engines make different tokens .* differ in 1 of 1 text") as refused:
        check_tokens(of(hello=(1, 2)), of(hello=(0, 1, 2)))
    assert "hello" in refused.value.details


@pytest.mark.parametrize("content", [None, "{}"])
def test_an_accepted_fingerprint_that_is_none_is_a_usage_error(tmp_path: Path, content: str | None) -> None:
    path = tmp_path / "accepted.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(UsageError, match="--fingerprint"):
        prepare(make_spec({"device": "cpu", "candidate": "torch_native", "fingerprint": str(path)}))
