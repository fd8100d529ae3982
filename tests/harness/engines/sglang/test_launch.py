import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from assay.harness.engines.launch import Launch, shell_line
from assay.harness.engines.sglang.launch import STAND_INS, command, settings
from assay.harness.errors import UsageError


def make(**changes: Any) -> Launch:
    fields: dict[str, Any] = {
        "role": "candidate", "backend": "triton", "model": Path("model"), "device": "cpu", "evidence": Path("evidence"),
        "log": Path("server.log"), "decode_backend": "torch_native", "startup_timeout": 900.0, "request_timeout": 300.0,
    }  # fmt: skip
    return Launch(**fields | changes)


@pytest.mark.parametrize(("device", "eager", "off"), [("cpu", False, True), ("cuda", True, True), ("cuda", False, False)])
def test_graphs_of_every_phase_stay_as_the_engine_has_them_unless_the_servers_run_without(
    device: str, eager: bool, off: bool
) -> None:
    flags = {word for word in command(make(device=device, eager=eager), 1, "n") if "graph" in word}
    assert flags == ({"--disable-cuda-graph"} if off else set())


@pytest.mark.parametrize(
    "given",
    ["--attention-backend=triton", "--port", "--served-model-name", "--model", "--attention-b", "--decode-attention-backend"],
)
def test_a_flag_that_assay_sets_is_refused(given: str) -> None:
    with pytest.raises(UsageError, match="which assay sets itself"):
        make(engine_args=(given,))


def test_what_a_server_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    dump = "SGLANG_CUDA_COREDUMP_BEFORE_CRASH"
    ours = settings(make(device="cuda", backend="package.module:function"), {"PYTHONPATH": "/a:/b", "NO_PROXY": "internal.example"})
    assert not ours.keys() & {"TRITON_INTERPRET", "SGLANG_USE_CPU_ENGINE"}, "and the path has no stand-ins"
    told = {"ASSAY_KERNEL": "package.module:function", "ASSAY_DELEGATE": "torch_native", "HF_HUB_OFFLINE": "1", dump: "false"}
    assert told.items() <= ours.items()
    assert (ours["ASSAY_EVIDENCE"], ours["PYTHONPATH"]) == (str(tmp_path / "evidence"), f"/a:/b:{tmp_path}")
    assert ours["no_proxy"] == ours["NO_PROXY"] == "internal.example,127.0.0.1,localhost"
    others = settings(make(extra={"ASSAY_DELEGATE": "mine"}), {dump: "true"})
    assert others["ASSAY_DELEGATE"] == "mine"
    assert not {"ASSAY_KERNEL", dump, "SGLANG_CPU_OMP_THREADS_BIND"} & others.keys()
    argv = command(make(common=("--page-size=64",), engine_args=("--dtype", "bfloat16")), 1, "n")
    assert argv[-3:] == ["--page-size=64", "--dtype", "bfloat16"], "the last of a flag counts"
    assert str(tmp_path / "model") in argv


def test_a_value_may_follow_its_flag_and_nothing_else() -> None:
    assert command(make(engine_args=("--page-size", "16")), 1, "n")[-2:] == ["--page-size", "16"]
    for given in (("16",), ("--page-size=16", "16")):
        with pytest.raises(UsageError, match="--engine-arg=16 is not a flag"):
            make(engine_args=given)


def test_what_a_side_is_given_adds_to_what_assay_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    given = make(device="cpu", extra={"PYTHONPATH": "/mine", "no_proxy": "intranet", "OMP_NUM_THREADS": "4"})
    set_ = settings(given, {"PYTHONPATH": "/inherited", "no_proxy": "other"})
    assert set_["PYTHONPATH"] == f"{STAND_INS}:/mine:{tmp_path}", "SGLang does not start on a CPU without the first"
    assert set_["no_proxy"] == set_["NO_PROXY"] == "intranet,127.0.0.1,localhost"
    assert set_["OMP_NUM_THREADS"] == "4"


@pytest.mark.parametrize(
    ("flags", "bound"),
    [
        ((), "1"),
        (("--tp-size=2",), "1|1"),
        (("--tp", "2"), "1|1"),
        (("--tp-size=2", "--pp-size=2"), "1|1|1|1"),
        (("--dp-size", "2"), "1|1"),
        (("--tp-size", "two"), "1"),
    ],
)
def test_each_rank_is_bound_to_the_core(flags: tuple[str, ...], bound: str) -> None:
    assert settings(make(cpu_core=1, engine_args=flags), {})["SGLANG_CPU_OMP_THREADS_BIND"] == bound


def test_the_shell_line_can_be_pasted() -> None:
    line = shell_line({"A": "two words"}, ["sh", "-c", 'printf %s "$A"'])
    assert subprocess.run(["sh", "-c", line], capture_output=True, text=True, check=True).stdout == "two words"
    assert shlex.split(line)[:2] == ["env", "A=two words"]


def test_the_shell_line_has_no_secrets() -> None:
    line = shell_line({"HF_TOKEN": "hunter2"}, ["python", "--ssl-keyfile-password", "hunter2", "--watermark-key=hunter2"])
    assert shlex.split(line) == ["env", "HF_TOKEN=***", "python", "--ssl-keyfile-password", "***", "--watermark-key=***"]


def test_the_stand_ins_are_found_and_refuse_to_work() -> None:
    code = (
        "import torchvision.transforms as T, torchvision.transforms.v2.functional, sgl_kernel\n"
        "from sgl_kernel import copy_all_layer_kv_cache_cpu\n"
        "class Sub(T.Compose): pass\n"
        "T.InterpolationMode.BICUBIC\n"
        "for call in (copy_all_layer_kv_cache_cpu, sgl_kernel.anything, T.Compose, Sub):\n"
        "    try: call()\n"
        "    except NotImplementedError as e: assert 'stand-in' in str(e)\n"
        "    else: raise SystemExit(f'{call} ran')\n"
    )
    subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": str(STAND_INS)}, check=True)
