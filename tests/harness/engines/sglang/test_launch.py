import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from assay.harness.engines.sglang.launch import STAND_INS, Launch, command, settings, shell_line
from assay.harness.errors import UsageError


def make(**changes: Any) -> Launch:
    fields: dict[str, Any] = {
        "role": "candidate",
        "backend": "triton",
        "model": Path("model"),
        "device": "cpu",
        "evidence": Path("evidence"),
        "log": Path("server.log"),
        "decode_backend": "torch_native",
        "startup_timeout": 900.0,
        "request_timeout": 300.0,
    }
    return Launch(**fields | changes)


def test_flags_of_the_user_come_last() -> None:
    argv = command(make(engine_args=("--dtype", "bfloat16")), 31000, "name")
    assert argv[-2:] == ["--dtype", "bfloat16"]
    assert argv.index("--dtype") < len(argv) - 2


def test_two_roles_differ_in_backend_port_and_name_only() -> None:
    reference = command(make(role="reference", backend="torch_native"), 1, "reference-name")
    candidate = command(make(role="candidate", backend="sage_attn"), 2, "candidate-name")
    differing = [pair for pair in zip(reference, candidate, strict=True) if pair[0] != pair[1]]
    assert differing == [("torch_native", "sage_attn"), ("1", "2"), ("reference-name", "candidate-name")]


@pytest.mark.parametrize(("device", "eager", "off"), [("cpu", False, True), ("cuda", True, True), ("cuda", False, False)])
def test_cuda_graphs(device: str, eager: bool, off: bool) -> None:
    assert ("--disable-cuda-graph" in command(make(device=device, eager=eager), 1, "n")) is off


@pytest.mark.parametrize(
    "given",
    ["--attention-backend=triton", "--port", "--served-model-name", "--model", "--attention-b", "--decode-attention-backend"],
)
def test_a_flag_that_assay_sets_is_refused(given: str) -> None:
    with pytest.raises(UsageError, match="which assay sets itself"):
        make(engine_args=(given,))


@pytest.mark.parametrize("given", ["--disable-radix-cache", "--dtype", "--page-size=16", "--", "-1", "--enable-metrics"])
def test_other_flags_are_accepted(given: str) -> None:
    assert command(make(engine_args=(given,)), 1, "n")[-1] == given


def test_a_value_may_follow_its_flag_and_nothing_else() -> None:
    assert command(make(engine_args=("--page-size", "16")), 1, "n")[-2:] == ["--page-size", "16"]
    for given in (("16",), ("--page-size=16", "16")):
        with pytest.raises(UsageError, match="--engine-arg=16 is no flag"):
            make(engine_args=given)


def test_only_a_cpu_server_sees_the_stand_ins() -> None:
    assert settings(make(device="cpu"), {})["PYTHONPATH"].split(":")[0] == str(STAND_INS)
    cuda = settings(make(device="cuda"), {})
    assert str(STAND_INS) not in cuda["PYTHONPATH"]
    assert "TRITON_INTERPRET" not in cuda


def test_what_a_side_is_given_adds_to_what_assay_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    given = make(device="cpu", extra={"PYTHONPATH": "/mine", "no_proxy": "intranet", "OMP_NUM_THREADS": "4"})
    set_ = settings(given, {"PYTHONPATH": "/inherited", "no_proxy": "other"})
    assert set_["PYTHONPATH"] == f"{STAND_INS}:/mine:{tmp_path}", "SGLang does not start on a CPU without the first"
    assert set_["no_proxy"] == set_["NO_PROXY"] == "intranet,127.0.0.1,localhost"
    assert set_["OMP_NUM_THREADS"] == "4"


def test_python_path_keeps_what_was_there_and_ends_with_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert settings(make(device="cuda"), {"PYTHONPATH": "/a:/b"})["PYTHONPATH"] == f"/a:/b:{tmp_path}"


def test_the_plugin_receives_the_name_of_a_kernel() -> None:
    assert settings(make(backend="package.module:function"), {})["ASSAY_KERNEL"] == "package.module:function"
    assert "ASSAY_KERNEL" not in settings(make(backend="triton"), {})


def test_evidence_folder_and_decode_backend_are_passed_on() -> None:
    ours = settings(make(decode_backend="triton"), {})
    assert ours["ASSAY_EVIDENCE"] == str(Path.cwd() / "evidence")
    assert ours["ASSAY_DELEGATE"] == "triton"


def test_a_models_folder_is_absolute_and_no_hub_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert str(tmp_path / "model") in command(make(), 1, "n")
    assert settings(make(), {})["HF_HUB_OFFLINE"] == "1"


def test_the_core_is_bound_only_where_one_is_given() -> None:
    assert settings(make(cpu_core=1), {})["SGLANG_CPU_OMP_THREADS_BIND"] == "1"
    assert "SGLANG_CPU_OMP_THREADS_BIND" not in settings(make(), {})


@pytest.mark.parametrize(
    ("flags", "bound"),
    [
        (("--tp-size=2",), "1|1"),
        (("--tp", "2"), "1|1"),
        (("--tp-size=2", "--pp-size=2"), "1|1|1|1"),
        (("--dp-size", "2"), "1|1"),
        (("--tp-size", "two"), "1"),
    ],
)
def test_each_rank_is_bound_to_the_core(flags: tuple[str, ...], bound: str) -> None:
    assert settings(make(cpu_core=1, engine_args=flags), {})["SGLANG_CPU_OMP_THREADS_BIND"] == bound


def test_a_server_reaches_itself_without_the_proxy() -> None:
    ours = settings(make(), {"NO_PROXY": "internal.example"})
    assert ours["no_proxy"] == ours["NO_PROXY"] == "internal.example,127.0.0.1,localhost"


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


def test_crash_dumps_are_off_unless_the_user_wants_them() -> None:
    assert settings(make(), {})["SGLANG_CUDA_COREDUMP_BEFORE_CRASH"] == "false"
    assert "SGLANG_CUDA_COREDUMP_BEFORE_CRASH" not in settings(make(), {"SGLANG_CUDA_COREDUMP_BEFORE_CRASH": "true"})


def test_further_variables_come_last() -> None:
    ours = settings(make(extra={"ASSAY_SHADOW": "sage_attn", "ASSAY_DELEGATE": "mine"}), {})
    assert (ours["ASSAY_SHADOW"], ours["ASSAY_DELEGATE"]) == ("sage_attn", "mine")
    assert "ASSAY_SHADOW" not in settings(make(), {})


@pytest.mark.parametrize("eager", [False, True])
def test_graphs_of_every_phase_stay_as_the_engine_has_them_unless_the_servers_run_without(eager: bool) -> None:
    flags = {word for word in command(make(device="cuda", eager=eager), 1, "n") if "graph" in word}
    assert flags == ({"--disable-cuda-graph"} if eager else set())
