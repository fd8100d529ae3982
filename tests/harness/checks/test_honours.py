"""What a backend does with what a layer asks for, told from what it computes."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from assay.harness.attention.bugs.faults import rounded_oracle
from assay.harness.attention.call import AttentionCall, KernelRefused, Mask
from assay.harness.attention.declaration import Declaration
from assay.harness.attention.sample_calls import call_of
from assay.harness.checks import honours
from assay.harness.checks.honours import ATTRIBUTES, measure_backend
from assay.harness.engines.registry import LayerRequest
from assay.harness.engines.vllm import native_kernel as vllm
from assay.harness.evidence.honours import BackendResult, Honours, Measured
from assay.reports.honours import honours_document
from assay.reports.markdown import to_markdown
from assay.worker import Event, Journal

ENDED = "The process that ran the kernel exited with status 1 before its work was done"
ORDER = ("softcap", "window", "sinks", "temperature")


@dataclass
class Computes:
    """Stands for a backend of SGLang: it computes what a function makes of the call."""

    what: Callable[[AttentionCall], Tensor]
    backend: str = "mine"
    assay: Declaration = field(default_factory=Declaration)

    def attempt(self, call: AttentionCall, layer: object) -> Tensor:
        return self.what(call)


FEATURES = ("window", "softcap", "temperature", "sinks")
"""What a layer can ask a backend for."""


def plain(call: AttentionCall) -> Tensor:
    return rounded_oracle(call.with_spec(mask=Mask(), softcap=0.0, temperature=0, sinks=()))


def raises(error: Exception, call: AttentionCall) -> Tensor:
    if call.spec.features:
        raise error
    return rounded_oracle(call)


def narrower(call: AttentionCall) -> Tensor:
    window = call.spec.mask.window
    is_narrower = window and call.phase == "decode"
    return rounded_oracle(call.with_spec(mask=Mask(window=window - 1)) if is_narrower else call)


@dataclass
class Stands:
    """Stands for an engine's module of backends."""

    what: Callable[[AttentionCall], Tensor]
    LATENT_PAGES: tuple[str, ...] = ("flashmla",)

    def kernel(self, name: str) -> Computes:
        return Computes(self.what)

    def version(self) -> str:
        return "0.5.23"


def measured(backend: str) -> BackendResult:
    """A backend that is measured in this process."""
    cells: list[Measured] = []

    def keep(event: Event) -> None:
        if event["event"] == "measured":
            cells.append(event["cell"])

    problem = measure_backend(Journal(keep), backend)
    return BackendResult(backend=backend, problem=problem, measured=tuple(cells))


def states(what: Callable[[AttentionCall], Tensor], monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.setattr(honours, "native_kernels", lambda engine: Stands(what))
    result = measured("mine")
    return {attribute.name: result.state(attribute.name) for attribute in ATTRIBUTES} | {"": result}


@pytest.mark.parametrize(
    ("what", "expected"),
    [
        (rounded_oracle, "honours"),
        (plain, "ignores"),
        (lambda call: 1.01 * rounded_oracle(call), "wrong"),
        (partial(raises, NotImplementedError("no softcap, no window, no sinks, no temperature here")), "refuses"),
        (partial(raises, TypeError("unexpected keyword argument 'sinks'")), "crashes"),
        (partial(raises, RuntimeError("CUDA error: an illegal memory access was encountered")), "crashes"),
        (partial(raises, KernelRefused("the interpreter is wrong here")), "not measured"),
    ],
)
def test_each_state_is_told_from_the_others(
    what: Callable[[AttentionCall], Tensor], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert {name: state for name, state in states(what, monkeypatch).items() if name in FEATURES} == dict.fromkeys(
        FEATURES, expected
    )


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("ignores", "where"),
    [
        (lambda call: call.q.dtype == torch.bfloat16, "bfloat16"),
        (lambda call: call.q.shape[2] == 128, "head_dim 128"),
        (lambda call: max(call.lens_k) > 300, "up to 3"),
    ],
)
def test_a_backend_that_ignores_something_in_one_shape_alone_does_not_honour_it(
    ignores: Callable[[AttentionCall], bool], where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def some(call: AttentionCall) -> Tensor:
        return plain(call) if ignores(call) else rounded_oracle(call)

    found = states(some, monkeypatch)
    assert {name: found[name] for name in FEATURES} == dict.fromkeys(FEATURES, "ignores")
    document = honours_document(Honours(engine="SGLang 0.5.23", torch="2", device="cpu", backends=(found[""],)))
    assert where in str(document.body)
    [test, *_] = [cell.test for cell in found[""].measured if cell.test]
    assert "128, torch.bfloat16" in test
    assert "(345, 0)" in test


def test_a_model_is_measured_in_its_dtype_and_head_dim_in_short_calls_and_long_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = set()

    def note(call: AttentionCall) -> Tensor:
        seen.add((call.q.dtype, call.q.shape[2], max(call.lens_k) > 300))
        return rounded_oracle(call)

    monkeypatch.setattr(honours, "native_kernels", lambda engine: Stands(note))
    measure_backend(Journal(lambda event: None), "mine", attributes=["window"], model=("float32", 80))
    assert seen == {(torch.float32, 80, False), (torch.float32, 80, True)}


def test_where_a_dtype_cannot_be_measured_another_is_and_the_document_says_which(monkeypatch: pytest.MonkeyPatch) -> None:
    def interpreted(call: AttentionCall) -> Tensor:
        if call.q.dtype == torch.bfloat16:
            raise KernelRefused("the interpreter is wrong in bfloat16")
        return plain(call) if call.q.shape[2] == 128 else rounded_oracle(call)

    found = states(interpreted, monkeypatch)
    assert (found["window"], found["bfloat16"]) == ("ignores", "not measured")
    document = honours_document(Honours(engine="SGLang 0.5.23", torch="2", device="cpu", backends=(found[""],)))
    assert "mine: float16 at head_dim 64, up to 51 keys; float16 at head_dim 128, up to 349 keys" in str(document.body)


def test_a_window_of_one_key_fewer_is_named_in_its_phase_with_a_test(monkeypatch: pytest.MonkeyPatch) -> None:
    found = states(narrower, monkeypatch)
    assert (found["window"], found["softcap"]) == ("wrong", "honours")
    wrong = [cell for cell in found[""].measured if cell.state == "wrong"]
    assert [(cell.attribute, cell.phase, cell.says) for cell in wrong] == [("window", "decode", "one key fewer")]
    assert "call_of([(1, 50), (1, 19)], (4, 2), 64, torch.float16" in wrong[0].test
    assert "call.with_spec(phase='decode', mask=Mask(causal=True, window=8))" in wrong[0].test


def test_every_attribute_changes_what_is_computed_by_far_more_than_rounding() -> None:
    for attribute, shape in ((attribute, shape) for attribute in ATTRIBUTES for shape in honours.SHAPES):
        for phase in attribute.phases:
            call = honours._call(attribute, phase, shape)
            truth = honours.oracle(call)
            for words, change in attribute.mistaken.items():
                apart = honours._error((honours.oracle(change(call))).to(call.q.dtype), truth)
                assert apart > max(0.1, 1.5 * (attribute.limit or 0)), (attribute.name, phase, shape, words)


def test_the_document_names_what_is_silent_and_what_cannot_run(monkeypatch: pytest.MonkeyPatch) -> None:
    ignoring = states(plain, monkeypatch)[""]
    absent = BackendResult(backend="fa3", problem="it needs a GPU")
    result = Honours(engine="SGLang 0.5.23", torch=torch.__version__, device="cpu", backends=(ignoring, absent))
    document = honours_document(result)
    assert document.headline == (
        "1 backend measured: in 5 cases, a feature that a layer asks for is ignored, or computed wrongly, without an error."
    )
    assert "fa3: it needs a GPU" in str(document.body)
    assert "test_mine_honours_softcap_in_prefill" in str(document.body)
    tests = {cell.attribute: cell.test for cell in ignoring.measured if cell.test}
    assert set(tests) == set(ORDER)
    [copied] = re.findall(r"import torch.*?(?=\n```)", to_markdown(document), re.DOTALL)
    namespace: dict[str, Any] = {}
    exec(copied, namespace)
    shown = {name: made for name, made in namespace.items() if name.startswith("test_mine_honours_")}
    assert len(shown) == len(tests)
    imported = {"Mask", "assert_correct", "call_of", "torch"}
    for name, made in shown.items():
        assert set(made.__code__.co_names) & imported <= set(namespace), name
    assert Honours.model_validate_json(result.model_dump_json(by_alias=True)) == result


def exits_on_sinks(call: AttentionCall) -> Tensor:
    if call.spec.sinks and call.phase == "extend":
        os._exit(1)  # as FlashAttention does on an error of CUDA
    return rounded_oracle(call)


def ends_on_sinks(journal: Journal, backend: str, **given: Any) -> str:
    honours.native_kernels = lambda engine: Stands(exits_on_sinks)  # type: ignore[assignment,return-value]
    return measure_backend(journal, backend, **given)


def ends_at_once(journal: Journal, **given: Any) -> None:
    os._exit(1)


@pytest.mark.slow  # fast: test_a_backend_that_ends_its_process_at_once_is_a_problem
def test_a_backend_that_ends_its_process_loses_one_cell(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(honours, "_JOB", f"{__name__}:ends_on_sinks")
    (result,) = honours.measure(("mine",), ("softcap", "sinks", "temperature")).backends
    assert {cell.attribute: cell.state for cell in result.measured if cell.state != "honours"} == {"sinks": "crashes"}
    assert [(cell.phase, cell.says) for cell in result.measured if cell.attribute == "sinks"] == [
        ("prefill", ENDED), ("prefill with a cached prefix", ENDED), ("decode", ""),
    ]  # fmt: skip
    assert [cell.attribute for cell in result.measured if cell.phase == "decode"] == ["softcap", "sinks", "temperature"]


def test_a_backend_that_ends_its_process_at_once_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(honours, "_JOB", f"{__name__}:ends_at_once")
    (result,) = honours.measure(("mine",)).backends
    assert result.problem.startswith("The process that ran the kernel exited with status 1")


@pytest.mark.slow
def test_sglangs_own_backends_on_a_cpu() -> None:
    """Live in 0.5.23: torch_native drops the soft cap; triton's decode sees one key fewer than its prefill."""
    pytest.importorskip("sglang")
    native, triton = honours.measure(("torch_native", "triton")).backends
    assert {name: native.state(name) for name in FEATURES} == {
        "window": "honours", "softcap": "ignores", "temperature": "ignores", "sinks": "crashes",
    }  # fmt: skip
    assert {name: triton.state(name) for name in ("softcap", "sinks", "window")} == {
        "softcap": "honours", "sinks": "honours", "window": "wrong",
    }  # fmt: skip
    (cell,) = (cell for cell in triton.measured if cell.state == "wrong")
    assert (cell.phase, cell.says) == ("decode", "one key fewer")
    assert [backend.state("chain of drafts") for backend in (native, triton)] == ["crashes", "honours"]
    assert [backend.state("mla") for backend in (native, triton)] == ["honours", "honours"]


@pytest.mark.parametrize(
    ("asked", "error", "says"),
    [
        ({"temperature": 8}, NotImplementedError, "vLLM's CPU_ATTN has no temperature"),
        ({"softcap": 8.0, "temperature": 8}, NotImplementedError, "no temperature"),
    ],
)
def test_what_a_backend_of_vllm_does_not_have_is_refused_and_not_left_out(
    asked: dict[str, Any], error: type[Exception], says: str
) -> None:
    """Its operator has no parameter for it, so that the call would be computed without."""
    backend = vllm.NativeKernel("CPU_ATTN", 32, Declaration(features=("softcap",)))
    call = call_of([(2, 1)], (4, 2), 64, torch.float32, "cpu").with_spec(**asked)
    with pytest.raises(error, match=says):
        backend.attempt(call, LayerRequest())
    with pytest.raises(KernelRefused, match="does not make vLLM's FP8 KV cache"):
        backend.attempt(call, LayerRequest(torch.float8_e4m3fn, (1.0, 1.0)))


@pytest.mark.parametrize(("backend", "only"), [("flashmla", True), ("triton", False)])
def test_a_backend_of_latents_alone_is_asked_for_nothing_else(backend: str, only: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(honours, "native_kernels", lambda engine: Stands(rounded_oracle))
    asked = {cell.attribute for cell in measured(backend).measured}
    assert (asked == {"mla"}) == only
    assert measured(backend).state("mla") == "honours"


@pytest.mark.slow
def test_vllms_own_backends_on_a_cpu() -> None:
    """In vLLM's own Python. Lengths that do not fill a block show that the rest of it does not matter."""
    python = os.environ.get("ASSAY_TEST_VLLM_PYTHON", str(Path(__file__).parents[3] / ".nox" / "vllm" / "bin" / "python"))
    if not Path(python).exists():
        pytest.skip(f"needs vLLM's own environment: {python} does not exist; ASSAY_TEST_VLLM_PYTHON names another Python")
    result = honours.measure(("CPU_ATTN", "CPU_MLA", "FLASH_ATTN"), engine="vllm", python=python)
    full, latent, absent = result.backends
    assert {name: full.state(name) for name in (*FEATURES, "not causal", "float32")} == {
        "window": "honours", "softcap": "honours", "sinks": "honours", "temperature": "refuses", "not causal": "honours",
        "float32": "honours",
    }  # fmt: skip
    assert [(cell.attribute, cell.phase, cell.state) for cell in latent.measured] == [("mla", "decode", "honours")]
    assert "no attention backend 'FLASH_ATTN'" in absent.problem
    assert result.engine.startswith("vLLM 0.3")
