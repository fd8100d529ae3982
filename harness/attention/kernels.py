"""Finding kernels, and what a kernel declares of itself.

A kernel is a function of the contract (`assay.harness.attention.call.Kernel`), published in the entry-point group ``assay.kernels``
or named directly as ``module:function``. `declares` is how it says what it computes; a kernel that says nothing is taken
to compute every phase.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

from assay.harness.attention.call import AttentionCall, Kernel, KernelRefused
from assay.harness.attention.published import is_path as is_path
from assay.harness.attention.published import published as published
from assay.harness.conditions import PHASES

if TYPE_CHECKING:  # see assay.harness.attention.call
    from torch import Tensor


@dataclass(frozen=True)
class Declaration:
    """What a kernel says of itself.

    Attributes:
        phases: phases that it computes; the others are delegated to the reference backend, and the report says so.
        package: distribution whose version stands behind it, empty for none.
        about: one line for people.
        noise: quantisation whose noise its output must have, such as "int8_qk"; empty for none but its dtype's rounding.
    """

    phases: tuple[str, ...] = PHASES
    package: str = ""
    about: str = ""
    noise: str = ""


def declares(
    phases: tuple[str, ...] = PHASES, package: str = "", about: str = "", noise: str = ""
) -> Callable[[Kernel], Kernel]:
    """Attach a `Declaration` to a kernel.

    Raises:
        ValueError: no phase, or one that does not exist.
    """
    if not phases or set(phases) - set(PHASES):
        raise ValueError(f"a kernel declares the phases {phases}; expected some of {PHASES}")

    def attach(kernel: Kernel) -> Kernel:
        vars(kernel)["assay"] = Declaration(phases, package, about, noise)
        return kernel

    return attach


def declaration(kernel: Kernel) -> Declaration:
    """What the kernel declares; every phase if it declares nothing."""
    found = getattr(kernel, "assay", None)
    return found if isinstance(found, Declaration) else Declaration()


def load(name: str) -> Kernel:
    """The kernel with this published name or ``module:function`` path.

    Raises:
        KernelRefused: no such kernel, or it cannot be imported; the message says which and why.
    """
    path = name if is_path(name) else published().get(name)
    if path is None:
        raise KernelRefused(f"no kernel is called {name!r}; published are {', '.join(sorted(published()))}")
    module, _, attribute = path.partition(":")
    try:
        found: object = importlib.import_module(module)
        for part in attribute.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        raise KernelRefused(f"kernel {name!r} ({path}) cannot be imported: {error}") from error
    if not callable(found):
        raise KernelRefused(
            f"kernel {name!r} ({path}) is {type(found).__name__}, expected a function of an AttentionCall"
        )
    return found


def run_kernel(name: str, kernel: Kernel, call: AttentionCall) -> Tensor:
    """The kernel's output, [total_q, num_q_heads, head_dim_v].

    Raises:
        KernelRefused: its shape or dtype breaks the contract.
    """
    out = kernel(call)
    expected = (*call.q.shape[:2], call.v.shape[2])
    if out.shape != expected or out.dtype != call.q.dtype:
        raise KernelRefused(
            f"{name} returned {out.dtype} {list(out.shape)} in layer {call.layer}; "
            f"expected {call.q.dtype} {list(expected)}"
        )
    return out


def title(name: str, kernel: Kernel, interpreted: bool) -> str:
    """How reports call a kernel, such as "sageattention 1.0.6 (Triton interpreter)"."""
    package = declaration(kernel).package
    if not package:
        return name
    try:
        text = f"{package} {version(package)}"
    except PackageNotFoundError:
        text = package
    return f"{text} (Triton interpreter)" if interpreted else text
