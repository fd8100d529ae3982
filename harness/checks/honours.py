"""Measures which attributes of a layer the attention backends of an engine honour, as kernels without a server.

A backend receives everything that a layer asks for. It may compute that (*honours*), raise an error that names it (*refuses*),
fail in another way (*crashes*), return attention without it (*ignores*), or return something else (*wrong*). Its output decides
which: it is compared with attention in float64 with the attribute, without it, and with common mistakes, such as a window of one
key fewer.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from assay import worker
from assay.harness.attention.call import AttentionCall, KernelRefused, Mask, default_device, refusal_behind
from assay.harness.attention.interpreter import interpret_without_gpu
from assay.harness.attention.oracle import oracle
from assay.harness.attention.sample_calls import call_of, latent_call
from assay.harness.engines.environments import python_path
from assay.harness.engines.registry import LayerRequest, NativeKernel, native_kernels
from assay.harness.evidence.honours import BackendResult, Honours, Measured, Shape, State, worst_of
from assay.harness.sides import Engine, profile_of
from assay.harness.text import one_line

PHASES: dict[str, list[tuple[int, int]]] = {
    "prefill": [(40, 0), (17, 0)],
    "prefill with a cached prefix": [(9, 40), (5, 20)],
    "decode": [(1, 50), (1, 19)],
    "verification": [(5, 40), (5, 20)],
}
"""(new tokens, cached prefix) of each sequence, by phase. Backends use a different code path in each."""
_LONG = {"prefill": (345, 0), "prefill with a cached prefix": (9, 340), "decode": (1, 340), "verification": (5, 340)}
"""An additional sequence of long calls: more keys than two tiles of 128."""
_HEADS = 4, 2
_Shape = tuple[str, int, bool]
"""Dtype and head_dim of a call, and whether it is long."""
SHAPES: tuple[_Shape, ...] = (("float16", 64, False), ("bfloat16", 128, True))
"""The shapes in which each attribute is measured if no model is named."""
# Replaces a dtype that assay cannot compute here, such as bfloat16 in Triton's interpreter.
_ELSE = "float16"
_MOST_HEAD_DIM = 256
_WINDOW, _SCALE = 8, 2.0**-9
# Relative distance of numbers with ten bits of mantissa, like `torch.finfo.eps`.
_TF32 = 2.0**-10
# The error (relative L1 of the worst query and head) of a correct computation is at most this many roundings of the output's
# dtype. Outputs with and without an attribute differ by 14 % or more.
_ROUNDINGS = 8
# Attributes that assay does not accept in a backend as a kernel, so that no test of a call can show its behaviour.
_BESIDE_THE_CONTRACT = ("not causal",)
_Change = Callable[[AttentionCall], AttentionCall]


@dataclass(frozen=True)
class _Attribute:
    """Something that a layer can ask of a backend."""

    name: str
    # Models or options that ask for it.
    about: str
    # An error that refuses it contains one of these words.
    words: tuple[str, ...]
    # The call's requests, by field of `CallSpec`, and the layer's other requests.
    spec: Mapping[str, Any] = field(default_factory=dict)
    layer: LayerRequest = field(default_factory=LayerRequest)
    # Changes the data of a call that asks for it.
    prepare: _Change = lambda call: call
    # Tokens per page of the KV pool, and the dtype of q, k and v if the attribute is a dtype.
    page: int = 1
    dtype: str = ""
    # Mistakes that a backend may make, by description; "" is attention without the attribute.
    mistaken: Mapping[str, _Change] = field(default_factory=dict)
    # Phases in which a layer may ask for it.
    phases: Sequence[str] = tuple(PHASES)[:3]
    # Largest error of a correct computation, if not that of rounding to the output's dtype.
    limit: float | None = None


def _plain(call: AttentionCall) -> AttentionCall:
    return call.with_spec(mask=Mask(), softcap=0.0, temperature=0, sinks=())


def _with_window(window: int, call: AttentionCall) -> AttentionCall:
    return call.with_spec(mask=Mask(window=window))


def _small(call: AttentionCall) -> AttentionCall:
    """Change k and v so that the pool stores them exactly with their scale, and hardly at all without: FP8 cannot be as small."""
    k, v = ((x.to(torch.float8_e4m3fn).to(x.dtype)) * _SCALE for x in (call.k, call.v))
    return replace(call, k=k, v=v).with_spec(scale=call.scale / _SCALE)


def _unscaled(everywhere: bool, call: AttentionCall) -> AttentionCall:
    """Store k and v of the cached prefix, or of all tokens, without their scale."""
    stored = torch.cat(
        [torch.arange(n) < (n if everywhere else p) for n, p in zip(call.lens_k, call.prefixes, strict=True)]
    )
    at = stored.to(call.k.device)[:, None, None]
    k, v = (torch.where(at, x.to(torch.float8_e4m3fn).to(x.dtype), x) for x in (call.k, call.v))
    return replace(call, k=k, v=v)


def _latent(call: AttentionCall) -> AttentionCall:
    """Turn the call into absorbed latent attention."""
    return latent_call(list(zip(call.lens_q, call.prefixes, strict=True)), call.q.dtype, call.q.device.type)


def _without_rope(call: AttentionCall) -> AttentionCall:
    q = call.q.clone()
    q[..., 512:] = 0
    return replace(call, q=q)


def _narrow(call: AttentionCall) -> AttentionCall:
    return replace(call, v=call.v[..., : call.v.shape[2] // 2].contiguous())


ATTRIBUTES = (
    _Attribute("softcap", "Gemma 2, Grok", ("cap",), {"softcap": 1.0}, mistaken={"": _plain}),
    _Attribute(
        "window", "Gemma 2 and 3, gpt-oss, Mistral", ("window",), {"mask": Mask(window=_WINDOW)},
        mistaken={
            "": _plain, "one key fewer": partial(_with_window, _WINDOW - 1), "one key more": partial(_with_window, _WINDOW + 1),
        },
    ),
    _Attribute("sinks", "gpt-oss", ("sink",), {"sinks": (1.0, 6.0, -1.0, 7.0)}, mistaken={"": _plain}),
    _Attribute("temperature", "Grok", ("temperature",), {"temperature": 8}, mistaken={"": _plain}),
    _Attribute(
        "KV scales", "checkpoints with an FP8 KV cache", ("scale", "fp8", "float8"),
        layer=LayerRequest(torch.float8_e4m3fn, (_SCALE, _SCALE)), prepare=_small,
        mistaken={"": partial(_unscaled, True), "stored without scales": partial(_unscaled, False)},
        phases=tuple(PHASES)[1:3], limit=0.3,  # q and the weights may be rounded to FP8 too; without scales it is 0.6 or more
    ),
    _Attribute(
        "not causal", "encoders", ("causal", "encoder"), {"mask": Mask(causal=False)}, mistaken={"": _plain}, phases=("prefill",),
    ),
    _Attribute(
        "chain of drafts", "EAGLE, n-grams", ("verify", "speculative", "draft"), layer=LayerRequest(drafts=True),
        phases=("verification",),
    ),
    _Attribute(
        "mla", "DeepSeek, Kimi", ("mla", "latent"), prepare=_latent,
        mistaken={"without the dims with RoPE": _without_rope, "scaled for 576 dims": lambda call: call.with_spec(scale=576**-0.5)},
    ),
    _Attribute("head_dim_v of half", "DeepSeek, MiMo", ("head_dim", "head dim", "v_head"), prepare=_narrow),
    _Attribute("pages of 16", "--page-size 16", ("page",), page=16),
    _Attribute("pages of 64", "--page-size 64", ("page",), page=64),
    _Attribute("bfloat16", "--dtype bfloat16", ("dtype", "bfloat16", "bf16"), dtype="bfloat16"),
    _Attribute("float32", "--dtype float32", ("dtype", "float32", "fp32", "data type"), dtype="float32"),
)  # fmt: skip


def measure(
    backends: Sequence[str],
    attributes: Collection[str] | None = None,
    note: Callable[[str], None] = lambda backend: None,
    model: tuple[str, int] | None = None,
    engine: Engine = "sglang",
    python: str = "",
) -> Honours:
    """Measure backends, each in a separate process of the engine's Python, so that a crash does not affect the others.

    Args:
        backends: names in the engine.
        attributes: names of `ATTRIBUTES`, or None for all.
        note: called with the name of each backend before it runs.
        model: dtype and head_dim to measure in, or None for `SHAPES`.
        engine: the backends' engine.
        python: the Python that has it, or an empty string for the one that runs assay.
    """
    interpret_without_gpu()
    results, versions = [], {"engine": "", "torch": ""}
    for backend in backends:
        note(backend)
        asked = {"backend": backend, "engine": engine, "attributes": attributes and sorted(attributes), "model": model}
        results.append(_contained(asked, python, versions))
    device = default_device()
    return Honours(
        **versions, device="cpu (Triton interpreted)" if device == "cpu" else device, backends=tuple(results)
    )


def _contained(asked: Mapping[str, Any], python: str, versions: dict[str, str]) -> BackendResult:
    """Measure one backend in a separate process, and continue in another if it ends that: FlashAttention calls `exit`."""
    known: dict[tuple[str, str], Measured] = {}
    backend = asked["backend"]
    path = python_path(python, os.environ.get("PYTHONPATH", "")) if python else ""

    def keep(event: worker.Event) -> None:
        if event["event"] == "measured":
            cell = Measured.model_validate(event["cell"])
            known[cell.attribute, cell.phase] = cell
        elif event["event"] == "versions":
            versions.update(engine=event["engine"], torch=event["torch"])

    while True:
        outcome = worker.run(
            worker.Job(_JOB, {**asked, "known": sorted(known)}), on_event=keep, python=python,
            environment={**os.environ, "PYTHONPATH": path} if python else None,
        )  # fmt: skip
        if isinstance(outcome, worker.Done):
            return BackendResult(backend=backend, problem=outcome.result, measured=tuple(known.values()))
        says = f"The process that ran the kernel {outcome.how} before its work was done"
        attribute, _, phase = outcome.during.partition(_IN)
        if not phase:
            return BackendResult(backend=backend, problem=one_line(says, 200))
        known[attribute, phase] = Measured(attribute=attribute, phase=phase, state="crashes", says=one_line(says, 160))


_JOB, _IN = f"{__name__}:measure_backend", " in "


def measure_backend(
    journal: worker.Journal,
    backend: str,
    engine: Engine = "sglang",
    attributes: Collection[str] | None = None,
    known: Collection[Sequence[str]] = (),
    model: Sequence[Any] | None = None,
) -> str:
    """Measure one backend in this process. On a CPU nothing is compiled: flex_attention would take half a minute for each shape.

    Args:
        journal: receives versions as the event "versions", and each result as "measured".
        backend: its name in the engine.
        engine: the engine.
        attributes: names of `ATTRIBUTES`, or None for all.
        known: attributes and phases to skip.
        model: see `measure`.

    Returns:
        The reason why it cannot be measured, or an empty string if it can.
    """
    interpret_without_gpu()
    natives = native_kernels(engine)
    of_latents = backend.partition("@")[0] in natives.LATENT_PAGES
    possible = [attribute for attribute in ATTRIBUTES if attribute.name == "mla" or not of_latents]
    asked = [attribute for attribute in possible if attributes is None or attribute.name in attributes]
    compiled = torch.compiler.set_stance("force_eager") if default_device() == "cpu" else nullcontext()
    with compiled:
        try:
            journal.write("versions", engine=f"{profile_of(engine).title} {natives.version()}", torch=torch.__version__)
            computed = natives.kernel(backend).assay.phases
        except (KernelRefused, ImportError) as error:
            return one_line(str(error), 200)
        for attribute in asked:
            for phase in attribute.phases:
                if _phase(phase) in computed and (attribute.name, phase) not in {(name, its) for name, its in known}:
                    journal.begin(f"{attribute.name}{_IN}{phase}")
                    measured = _measured(engine, backend, attribute, phase, _shapes_of(model))
                    journal.end()
                    journal.write("measured", cell=measured)
    return ""


def _shapes_of(model: Sequence[Any] | None) -> tuple[_Shape, ...]:
    """Return the shapes for measuring a model's attributes, or the default ones if its own cannot be measured."""
    dtype, head_dim = model or ("", 0)
    known = dtype in ("float16", "bfloat16", "float32") and 0 < head_dim <= _MOST_HEAD_DIM
    return ((dtype, head_dim, False), (dtype, head_dim, True)) if known else SHAPES


def _measured(engine: Engine, backend: str, attribute: _Attribute, phase: str, shapes: Sequence[_Shape]) -> Measured:
    """Measure an attribute in a phase: return the worst result of all shapes, and name its shape if another one is better."""
    try:
        made = native_kernels(engine).kernel(backend if attribute.page == 1 else f"{backend}@{attribute.page}")
    except (KernelRefused, ImportError) as error:
        state: State = "refuses" if _names(error, attribute) else "crashes"
        return Measured(attribute=attribute.name, phase=phase, state=state, says=one_line(str(error), 160))
    cells = []
    for dtype, head_dim, is_long in shapes:
        for each in dict.fromkeys((attribute.dtype or dtype, attribute.dtype or _ELSE)):
            shape = (each, head_dim, is_long)
            cell = _attempt(made, attribute, phase, shape)
            if cell.state != "not measured":
                break
        in_a_call = attribute.spec and attribute.name not in _BESIDE_THE_CONTRACT
        if cell.state in ("ignores", "wrong") and in_a_call:
            cell = cell.model_copy(update={"test": _test(f"{engine}:{made.backend}", attribute, phase, shape)})
        cells.append(cell)
    worst = worst_of(cells)
    alike = all((cell.state, cell.says) == (worst.state, worst.says) for cell in cells)
    return worst.model_copy(
        update={
            "shapes": tuple(shape for cell in cells for shape in cell.shapes),
            "where": None if alike else worst.shapes[0],
        }
    )


def _attempt(backend: NativeKernel, attribute: _Attribute, phase: str, shape: _Shape) -> Measured:
    """Run a backend on a call that asks for an attribute, and classify its output."""
    call = _call(attribute, phase, shape)
    of = Shape(dtype=shape[0], head_dim=call.q.shape[2], keys=max(call.lens_k))
    measured = partial(Measured, attribute=attribute.name, phase=phase, shapes=(of,))
    try:
        out = backend.attempt(call, attribute.layer)
    except Exception as raised:  # a backend may raise anything
        if refusal := refusal_behind(raised):  # from assay, for example because Triton's interpreter is wrong
            return measured(state="not measured", says=one_line(str(refusal), 160))
        return measured(state="refuses" if _names(raised, attribute) else "crashes", says=_said(raised))
    error = _error(out, oracle(call))
    others = {words: _error(out, oracle(change(call))) for words, change in attribute.mistaken.items()}
    limit = attribute.limit or _ROUNDINGS * (_TF32 if out.dtype == torch.float32 else torch.finfo(out.dtype).eps)
    nearest = min(others, key=others.__getitem__, default="")
    if error <= min([limit, *others.values()]):
        in_tf32 = out.dtype == torch.float32 and error > _ROUNDINGS * torch.finfo(out.dtype).eps
        return measured(state="honours", says="with products in TF32" if in_tf32 else "", error=error)
    if others and others[nearest] <= limit:
        return measured(state="wrong" if nearest else "ignores", says=nearest, error=error)
    return measured(state="wrong", says="neither with nor without it", error=error)


def _call(attribute: _Attribute, phase: str, shape: _Shape) -> AttentionCall:
    dtype, head_dim, is_long = shape
    lens = [*PHASES[phase], *[_LONG[phase]] * is_long]
    call = attribute.prepare(call_of(lens, _HEADS, head_dim, getattr(torch, dtype), default_device()))
    return call.with_spec(phase=_phase(phase), **attribute.spec)


def _phase(phase: str) -> str:
    """Return the phase of the contract that one of `PHASES` is in."""
    return "decode" if phase == "decode" else "extend"


def _error(out: Tensor, truth: Tensor) -> float:
    """Return the relative L1 error of the worst query and head, or infinity if a number is not finite."""
    errors = (out.double() - truth).abs().mean(-1) / truth.abs().mean(-1)
    return float(errors.max()) if bool(errors.isfinite().all()) else float("inf")


def _said(error: Exception) -> str:
    return one_line(f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}", 160)


def _names(error: Exception, attribute: _Attribute) -> bool:
    """Return True if an error is a refusal of the attribute: a deliberate error that names it.

    A `TypeError` for an unknown argument names it too, but is not a refusal.
    """
    on_purpose = isinstance(error, (NotImplementedError, AssertionError, ValueError, RuntimeError))
    return on_purpose and any(word in str(error).lower() for word in attribute.words)


def _test(backend: str, attribute: _Attribute, phase: str, shape: _Shape) -> str:
    """Write a test with a call for which a backend, such as "sglang:triton", does not honour an attribute."""
    spec = {"phase": _phase(phase), **attribute.spec}
    words = ", ".join(f"{name}={value!r}" for name, value in spec.items())
    dtype, head_dim, is_long = shape
    lens = [*PHASES[phase], *[_LONG[phase]] * is_long]
    call = f'call_of({lens}, {_HEADS}, {head_dim}, torch.{dtype}, "{default_device()}")'
    name = f"test_{backend.partition(':')[2]}_honours_{attribute.name}_in_{phase}".replace(" ", "_")
    return f'def {name}():\n    call = {call}\n    assert_correct("{backend}", call.with_spec({words}))\n'
