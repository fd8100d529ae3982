"""Chooses the calls of the op-level matrix for a kernel's check, from its declaration and the options."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TypedDict, TypeVar, Unpack

import torch

from assay.harness.attention import kernels
from assay.harness.attention.call import Kernel, KernelRefused, default_device
from assay.harness.attention.declaration import Declaration
from assay.harness.attention.interpreter import interpret_without_gpu
from assay.harness.attention.matrix import DTYPES, HEAD_DIMS, Case, Size, asked_by, dtype_name
from assay.harness.attention.matrix import cases as cases_of
from assay.harness.attention.model_shapes import ASKED_BY, SHAPES
from assay.harness.attention.noise import FAMILIES, family
from assay.harness.conditions import PHASES
from assay.harness.errors import UsageError
from assay.harness.text import did_you_mean

T = TypeVar("T")


class MatrixOptions(TypedDict, total=False):
    """The options that choose a kernel's calls. None, where allowed, means the default.

    Attributes:
        phases: phases to run; by default those that the kernel declares.
        dtypes: for example "bfloat16"; by default those that the kernel declares, of float16, bfloat16 and float32.
        size: the size of the matrix, "small" or "full". The small one stops early if the kernel is clearly wrong.
        device: by default "cuda" if there is a GPU, else "cpu".
        head_dims: head dims that the kernel must compute; by default those that it declares, or else 64 and 128. The default also
            tries others: a kernel may raise on them, which leaves them uncovered, but must not be wrong.
        like: models whose shapes to add, such as "llama-3-8b"; by default the common ones in the full matrix.
        seed: the seed of the matrix; by default 0.
        quick: whether to use only one dtype and one head_dim, without repeated runs.
    """

    phases: Sequence[str] | None
    dtypes: Sequence[torch.dtype | str] | None
    size: Size
    device: str | None
    head_dims: Sequence[int] | None
    like: Sequence[str] | None
    seed: int
    quick: bool


def narrowed(declared: Declaration, options: MatrixOptions) -> MatrixOptions:
    """Return the options of a quick check: the cheapest dtype and head dim that the given options allow."""
    cheap = "float32" if _checked_device(options.get("device")) == "cpu" else "bfloat16"
    dtypes = [dtype_name(each) for each in _asked(tuple(DTYPES), _asked(declared.dtypes, options.get("dtypes")))]
    dims = _asked(HEAD_DIMS, _asked(declared.head_dims, options.get("head_dims")))
    return {**options, "dtypes": [cheap if cheap in dtypes else dtypes[0]], "head_dims": [min(dims)]}


def named(kernel: str | Kernel) -> tuple[str, Kernel]:
    """Return a kernel and its name: ``module:function`` if it can be imported that way, else its own name.

    Raises:
        UsageError: no such kernel.
    """
    if isinstance(kernel, str):
        return kernel, kernels.find("", kernel)
    interpret_without_gpu()
    module, name = getattr(kernel, "__module__", ""), getattr(kernel, "__qualname__", type(kernel).__name__)
    path = f"{module}:{name}"
    try:
        loaded = kernels.load(path) if module and module != "__main__" else None
    except KernelRefused:
        loaded = None
    if loaded is not None and kernel in (loaded, getattr(loaded, "function", None)):
        return path, loaded
    try:
        return name, kernels.taking_calls(name, kernel)
    except KernelRefused as error:
        raise UsageError(
            f"{error}.", "a function of an AttentionCall", "write one, as docs/library.md describes"
        ) from None


def matrix_of(declared: Declaration, **options: Unpack[MatrixOptions]) -> list[Case]:
    """List the cases of a check of a kernel with this declaration.

    Args:
        declared: the declaration, or `Declaration()` for a kernel without one.
        options: see `check`.

    Raises:
        TypeError: no such option.
        UsageError: no such phase, dtype, size, device or model, or none that is both requested and declared.
    """
    for name in options.keys() - MatrixOptions.__annotations__.keys():
        raise TypeError(f"unexpected option {name!r}; expected one of {', '.join(MatrixOptions.__annotations__)}")
    asked = _asked(declared.phases, options.get("phases"))
    dtypes = _asked(declared.dtypes, options.get("dtypes"))
    head_dims = _asked(declared.head_dims, options.get("head_dims"))
    size, like = options.get("size", "small"), options.get("like")
    words = [dtype_name(dtype) for dtype in _asked(tuple(DTYPES), dtypes)]
    known: tuple[tuple[str, Sequence[str], Sequence[str] | Mapping[str, object]], ...] = (
        ("phase", asked, PHASES),
        ("dtype", words, DTYPES),
        ("size", [size], ("small", "full")),
        ("model", like or (), SHAPES),
    )
    for what, values, expected in known:
        for value in values:
            if value not in expected:
                flag = "--like" if what == "model" else f"--{what}"
                meant = "did you mean 'extend'?" if what == "phase" and value.startswith("pre") else ""
                do = meant or did_you_mean(value, list(expected)) or f"give {flag} one of these, or leave it out"
                raise UsageError(f"The {what} is {value!r}.", f"one of {', '.join(expected)}", do)
    return cases_of(
        tuple(asked),
        _checked_device(options.get("device")),
        words,
        options.get("seed", 0),
        size,
        None if head_dims is None else tuple(head_dims),
        like,
        declared,
    )


def declined(declared: Declaration, options: MatrixOptions) -> tuple[str, ...]:
    """List the parts of the usual matrix that a declaration leaves out unless requested: "float32", "head_dim 128"."""
    dtypes = declared.dtypes if options.get("dtypes") is None else None
    dims = declared.head_dims if options.get("head_dims") is None else None
    lost = [dtype for dtype in DTYPES if dtypes is not None and dtype not in dtypes]
    left = [f"head_dim {dim}" for dim in HEAD_DIMS if dims is not None and dim not in dims]
    asks = [
        f"{value}, as {model} asks for"
        for model in options.get("like") or ()
        for value in ASKED_BY.get(model, ())
        if value not in asked_by(model, declared.features)
    ]
    return (*lost, *left, *["a cached prefix"] * (not declared.prefix), *asks)


def command_of(path: str, options: MatrixOptions, noise: str | None, calls: int | None, case: str | None = None) -> str:
    """Write the command that repeats a check of a kernel that can be imported."""
    words = ["assay", "check", path]
    words += [word for phase in options.get("phases") or () for word in ("--phase", phase)]
    words += [word for dtype in options.get("dtypes") or () for word in ("--dtype", str(dtype).removeprefix("torch."))]
    words += [word for dim in options.get("head_dims") or () for word in ("--head-dim", str(dim))]
    words += [word for model in options.get("like") or () for word in ("--like", model)]
    for flag, value, usual in (
        ("noise", noise, None),
        ("size", options.get("size", "small"), "small"),
        ("device", options.get("device"), None),
        ("seed", options.get("seed", 0), 0),
        ("calls", calls, None),
        ("case", case, None),
    ):
        words += [f"--{flag}", str(value)] * (value != usual)
    words += ["--quick"] * options.get("quick", False)
    return shlex.join(words)


def _checked_device(device: str | None) -> str:
    """Return the named PyTorch device, or the default; raise a UsageError if it does not exist here."""
    if device is None:
        return default_device()
    if not re.fullmatch(r"cpu|cuda(:\d+)?", device):
        raise UsageError(
            f"The device is {device!r}.", "cpu or cuda, or cuda:N for one of several GPUs", "name one of these"
        )
    if device.startswith("cuda") and default_device() == "cpu":
        raise UsageError(
            f"The device is {device}, but PyTorch {torch.__version__} sees no GPU.",
            "cpu, or a GPU that nvidia-smi lists, with a CUDA build of PyTorch",
            "leave out --device, or install a CUDA build of PyTorch",
        )
    if device.startswith("cuda:") and int(device[5:]) >= (count := torch.cuda.device_count()):
        raise UsageError(
            f"The device is {device}, but only {count} GPUs were found.", f"cuda:0 to cuda:{count - 1}", "name one"
        )
    return device


def declared_with(declared: Declaration, noise: str | None) -> Declaration:
    """Return a declaration with the allowed noise: the named one, or its own for None.

    Raises:
        UsageError: no such noise.
    """
    if noise is None:
        return declared
    try:
        family(noise)
    except ValueError:
        parts = 'or parts such as "k:int8-token,v:e4m3-head"'
        raise UsageError(
            f"The noise is {noise!r}.",
            f"one of {', '.join(filter(None, FAMILIES))}, {parts}",
            did_you_mean(noise, list(filter(None, FAMILIES))) or "give --noise one of these, or leave it out",
        ) from None
    return replace(declared, noise=noise)


def _asked(declared: T, asked: T | None) -> T:
    return declared if asked is None else asked
