"""What a model's layers ask of attention, and what a run does if its reference ignores it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from torch import Tensor

from assay.harness.attention.call import AttentionCall
from assay.harness.attention.declaration import declares
from assay.harness.backend import Backend
from assay.harness.checks import honours
from assay.harness.config import RunSpec
from assay.harness.engines.model import TINY_MODEL, model_shape, resolve_model
from assay.harness.errors import UsageError
from assay.harness.evidence.honours import BackendResult, Honours, Measured, State
from assay.harness.progress import ProgressDisplay
from assay.harness.run.doctor import examine
from assay.harness.run.plan import Plan, prepare
from assay.harness.run.preflight import asked_of, check_asked, served_in, unmet
from assay.harness.sides import ROLES, Side


@pytest.fixture
def model(tmp_path: Path) -> Callable[..., Path]:
    """A function that makes a copy of the tiny model whose configuration says more."""

    def make(**says: Any) -> Path:
        folder = Path(shutil.copytree(TINY_MODEL, tmp_path / "model", dirs_exist_ok=True))
        config = json.loads((TINY_MODEL / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | says))
        return folder

    return make


@pytest.mark.parametrize(
    ("says", "asks"),
    [
        ({}, {}),
        ({"attn_logit_softcapping": 50.0}, {"softcap": "attn_logit_softcapping: 50.0"}),
        ({"attn_logit_softcapping": None, "sliding_window": None}, {}),
        ({"sliding_window": 64}, {"window": "sliding_window: 64"}),
        ({"sliding_window": 64, "use_sliding_window": False}, {}),
        ({"sliding_window": 64, "layer_types": ["full_attention"] * 4}, {}),
        ({"sliding_window": 64, "layer_types": ["sliding_attention", "full_attention"]}, {"window": "sliding_window: 64"}),
        ({"sliding_window": 10**6}, {}),
        ({"model_type": "gpt_oss"}, {"sinks": "model_type: gpt_oss"}),
        ({"attn_temperature_len": 1024}, {"temperature": "attn_temperature_len: 1024"}),
    ],
)
def test_what_layers_ask_for_is_read_from_the_configuration(
    model: Callable[..., Path], says: dict[str, Any], asks: dict[str, str]
) -> None:
    assert model_shape(model(**says)).asks == asks


def test_calls_outside_of_a_server_ask_for_what_layers_do(model: Callable[..., Path]) -> None:
    gemma = model(sliding_window=4096, max_position_embeddings=8192, attn_logit_softcapping=50.0)
    assert model_shape(gemma).asked == ("window 4096", "softcap 50")
    assert model_shape(model(model_type="gpt_oss")).asked == ("sinks near 0",)
    assert model_shape(model()).asked == ()


SCALED = "model.layers.0.self_attn.k_scale"
BY_FLAG = {"stored_kv": "--kv-cache-dtype: fp8_e5m2", "KV scales": f"{SCALED}, for --kv-cache-dtype: fp8_e5m2"}
BY_CHECKPOINT = {"stored_kv": "kv_cache_quant_algo: FP8", "KV scales": f"{SCALED}, for kv_cache_quant_algo: FP8"}


@pytest.mark.parametrize(
    ("name", "flags", "asks"),
    [
        ("tiny", (), {}),
        ("tiny", ("--kv-cache-dtype", "fp8_e4m3"), {"stored_kv": "--kv-cache-dtype: fp8_e4m3"}),
        ("tiny", ("--kv-cache-dtype=auto",), {}),
        ("tiny-fp8-kv", (), BY_CHECKPOINT),
        ("tiny-fp8-kv", ("--kv-cache-dtype=auto",), BY_CHECKPOINT),
        ("tiny-fp8-kv", ("--kv-cache-dtype=fp8_e5m2",), BY_FLAG),
        ("tiny-fp8-kv", ("--kv-cache-dtype=bf16",), {}),
    ],
)
def test_a_cache_in_fp8_asks_for_stored_k_and_v_and_a_checkpoint_with_scales_for_these(
    name: str, flags: tuple[str, ...], asks: dict[str, str]
) -> None:
    assert model_shape(resolve_model(name), flags).asks == asks


_FLOATS, _INTS = {"type": "float", "num_bits": 8}, {"type": "int", "num_bits": 8}


@pytest.mark.parametrize(
    ("in_config", "apart", "asks"),
    [
        ({"kv_cache_scheme": _FLOATS}, None, "kv_cache_scheme: fp8"),
        ({"kv_cache_scheme": _FLOATS, "kv_cache_quant_algo": "FP8"}, None, "kv_cache_quant_algo: FP8"),
        ({"kv_cache_scheme": _INTS}, None, ""),
        ({"kv_cache_scheme": _FLOATS, "quant_method": "compressed-tensors"}, None, ""),
        ({"quant_method": "fp8"}, {"kv_cache_quant_algo": "FP8"}, ""),
        (None, {"quantization": {"kv_cache_quant_algo": "FP8"}}, "kv_cache_quant_algo: FP8"),
        (None, {"kv_cache_scheme": _FLOATS}, "kv_cache_scheme: fp8"),
        (None, {"quantization": {"quant_algo": "FP8"}}, ""),
    ],
)
def test_a_checkpoint_says_that_its_cache_is_in_fp8_in_its_configuration_or_in_a_file_of_its_own(
    model: Callable[..., Path], in_config: dict[str, Any] | None, apart: dict[str, Any] | None, asks: str
) -> None:
    folder = model(**({"quantization_config": in_config} if in_config else {}))
    if apart is not None:
        (folder / "hf_quant_config.json").write_text(json.dumps(apart))
    assert model_shape(folder).asks.get("stored_kv", "") == asks


def test_each_side_is_asked_for_what_its_own_flags_say() -> None:
    candidate = Side(backend="triton", model="tiny-fp8-kv", flags=("--kv-cache-dtype=bf16",))
    spec = RunSpec.of(reference="triton", candidate=candidate, model="tiny-fp8-kv")
    asked = asked_of(spec, dict.fromkeys(ROLES, resolve_model("tiny-fp8-kv")))
    assert asked == {"reference": BY_CHECKPOINT, "candidate": {}}


@pytest.mark.parametrize(
    ("flags", "device", "served"),
    [
        ((), "cuda", ("bfloat16", 128)),
        ((), "cpu", ("float32", 128)),
        (("--dtype=half",), "cpu", ("float16", 128)),
        (("--dtype", "auto"), "cuda", ("bfloat16", 128)),
    ],
)
def test_backends_are_measured_in_the_dtype_and_head_dim_that_a_side_serves(
    model: Callable[..., Path], flags: tuple[str, ...], device: str, served: tuple[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = model(head_dim=128, dtype="bfloat16", torch_dtype="bfloat16", attn_logit_softcapping=50.0)
    assert served_in(folder, Side(backend="triton", model=str(folder), flags=flags), device) == served
    asked = []

    def measure(names: list[str], attributes: set[str], model: tuple[str, int] | None = None, **side: Any) -> Honours:
        asked.append(model)
        return Honours(engine="", torch="", device="cpu", backends=(BackendResult(backend="triton"),))

    monkeypatch.setattr(honours, "measure", measure)
    list(unmet({"candidate": Backend.parse("triton")}, {"candidate": {"softcap": "50"}}, {"candidate": served}))
    assert asked == [served]


@pytest.mark.parametrize("state", ["ignores", "honours"])
def test_scales_of_stored_k_and_v_are_measured_of_backends_and_declared_by_kernels(
    monkeypatch: pytest.MonkeyPatch, state: State
) -> None:
    measured = []
    cell = Measured(attribute="KV scales", phase="decode", state=state)

    def measure(names: list[str], attributes: set[str], model: tuple[str, int] | None = None, **side: Any) -> Honours:
        measured.append((names, attributes))
        return Honours(engine="", torch="", device="cpu", backends=(BackendResult(backend="triton", measured=(cell,)),))

    monkeypatch.setattr(honours, "measure", measure)
    asks = dict.fromkeys(ROLES, BY_CHECKPOINT)
    backends = {"reference": Backend.parse("triton"), "candidate": Backend.parse(f"{__name__}:capping")}
    texts = [(role, fatal, text) for role, fatal, text in unmet(backends, asks)]
    of_kernel = f"{__name__}:capping does not declare the stored_kv that the model asks for (kv_cache_quant_algo: FP8)"
    of_backend = f"triton ignores the KV scales that the model asks for ({BY_CHECKPOINT['KV scales']})"
    assert measured == [(["triton"], {"KV scales"})]
    assert texts == [("candidate", True, of_kernel), *([("reference", True, of_backend)] * (state == "ignores"))]
    only = {"stored_kv": BY_CHECKPOINT["stored_kv"]}
    assert list(unmet({"reference": Backend.parse("triton")}, {"reference": only})) == []
    assert len(measured) == 1, "a cache in FP8 without scales asks no backend for anything"


def planned(model: Path, **roles: str) -> Plan:
    return prepare(RunSpec.of(**{"reference": "torch_native", "candidate": "triton", "model": str(model), **roles}))


def checked(plan: Plan) -> str:
    shown = StringIO()
    with ProgressDisplay(Console(file=shown, width=400)) as display:
        check_asked(plan, display)
    return shown.getvalue()


def test_a_model_of_plain_attention_is_not_measured(model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(honours, "measure", lambda *_, **__: pytest.fail("nothing is asked for"))
    assert checked(planned(model())) == ""


@pytest.mark.slow
def test_a_reference_that_ignores_what_is_asked_for_ends_a_run_and_a_candidate_is_said_to(model: Callable[..., Path]) -> None:
    pytest.importorskip("sglang")
    capped = model(attn_logit_softcapping=50.0)
    with pytest.raises(UsageError) as error:
        checked(planned(capped))
    assert error.value.found == (
        "The reference torch_native ignores the softcap that the model asks for (attn_logit_softcapping: 50.0)."
    )
    assert "The candidate torch_native ignores the softcap that the model asks for" in checked(
        planned(capped, reference="triton", candidate="torch_native")
    )
    windowed = model(sliding_window=64)
    assert (
        "The candidate triton computes something else for the window that the model asks for (sliding_window: 64) in decode: "
        "one key fewer."
    ) in checked(planned(windowed))
    with pytest.raises(UsageError) as error:
        checked(planned(resolve_model("tiny-fp8-kv")))
    assert error.value.found == (
        f"The reference torch_native ignores the KV scales that the model asks for ({BY_CHECKPOINT['KV scales']})."
    )
    assert "ignores" not in checked(planned(resolve_model("tiny-fp8-kv"), reference="triton"))


@pytest.mark.parametrize(
    ("cells", "fatal", "says"),
    [
        ((), False, "torch_native could not be measured on the softcap that the model asks for"),
        ((("not measured", "the interpreter is wrong"),), False, "could not be measured on the softcap"),
        ((("wrong", "one key fewer"), ("honours", "")), False, "torch_native computes something else for the softcap"),
        ((("wrong", "neither with nor without it"),), True, "neither with nor without it"),
        ((("wrong", "one key fewer"), ("crashes", "TypeError")), True, "computes something else for the softcap"),
    ],
)
def test_what_is_not_shown_is_said_and_only_a_window_of_a_key_more_or_less_is_nearly_right(
    model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, cells: Any, fatal: bool, says: str
) -> None:
    measured = tuple(
        Measured(attribute="softcap", phase=phase, state=state, says=words)
        for phase, (state, words) in zip(("prefill", "decode"), cells, strict=False)
    )

    def measure(names: list[str], *_: Any, **__: Any) -> Honours:
        problem = "" if cells else "it cannot run"
        backends = tuple(BackendResult(backend=name, problem=problem, measured=measured) for name in names)
        return Honours(engine="", torch="", device="cpu", backends=backends)

    monkeypatch.setattr(honours, "measure", measure)
    plan = planned(model(attn_logit_softcapping=50.0))
    if fatal:
        with pytest.raises(UsageError, match=says):
            checked(plan)
    else:
        assert f"The reference {says}" in checked(plan) or says in checked(plan)
    spec = RunSpec.of(reference="torch_native", candidate="triton", model=str(plan.model))
    (examined,) = (one for one in examine(spec) if one.id == "asked")
    assert (examined.status == "missing", "both sides honour" in examined.found) == (fatal, False)


@declares(features=("softcap",))
def capping(call: AttentionCall) -> Tensor:
    return call.q


@pytest.mark.parametrize("role", ["reference", "candidate"])
@pytest.mark.parametrize(
    ("says", "missing"),
    [
        ({"attn_logit_softcapping": 50.0}, ""),
        ({"attn_logit_softcapping": 50.0, "sliding_window": 64}, "the window that the model asks for (sliding_window: 64)"),
        ({"model_type": "gpt_oss"}, "the sinks that the model asks for (model_type: gpt_oss)"),
    ],
)
def test_a_kernel_that_does_not_declare_what_layers_ask_for_ends_a_run_before_servers_start(
    model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, role: str, says: dict[str, Any], missing: str
) -> None:
    cells = tuple(Measured(attribute=name, phase="decode", state="honours") for name in ("softcap", "window", "sinks"))
    result = Honours(engine="", torch="", device="cpu", backends=(BackendResult(backend="triton", measured=cells),))
    monkeypatch.setattr(honours, "measure", lambda *_, **__: result)
    kernel = f"{__name__}:capping"
    plan = planned(model(**says), **{"reference": "triton", "candidate": "triton", role: kernel})
    spec = RunSpec.of(model=str(plan.model), reference=plan.reference.name, candidate=plan.candidate.name)
    (examined,) = (one for one in examine(spec) if one.id == "asked")
    assert examined.status == ("missing" if missing else "ok")
    if not missing:
        assert checked(plan) == ""
        return
    with pytest.raises(UsageError) as error:
        checked(plan)
    assert error.value.found == f"The {role} {kernel} does not declare {missing}."
    assert "@declares(features=...)" in error.value.expected
