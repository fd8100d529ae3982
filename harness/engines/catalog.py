"""Which attention backends can be named: SGLang's own and every published kernel. Nothing is started to find out."""

from __future__ import annotations

import ast
import difflib
import importlib.util
from functools import cache
from pathlib import Path

from assay.harness.attention import kernels
from assay.harness.attention.call import PHASES, KernelRefused
from assay.harness.errors import UsageError

# Where SGLang keeps its list: since 0.5.18, and before.
_SOURCES = ("srt/arg_groups/choices.py", "srt/server_args.py")


@cache
def sglang_backends() -> tuple[str, ...]:
    """SGLang's own attention backends, read from its source: importing it takes seconds.

    Raises:
        UsageError: SGLang is not installed, or its list cannot be found.
    """
    spec = importlib.util.find_spec("sglang")
    if spec is None or not spec.submodule_search_locations:
        raise UsageError(
            "SGLang is not installed.", "the package sglang", "nox -s accuracy installs it, see the README"
        )
    root = Path(next(iter(spec.submodule_search_locations)))
    for source in _SOURCES:
        for node in ast.walk(ast.parse((root / source).read_text())) if (root / source).exists() else ():
            if isinstance(node, ast.Assign) and any(
                getattr(t, "id", "") == "ATTENTION_BACKEND_CHOICES" for t in node.targets
            ):
                return tuple(ast.literal_eval(node.value))
    raise UsageError(
        f"no list of attention backends in {root}.", "SGLang 0.5.12 or newer", "install a known version of SGLang"
    )


def is_url(backend: str) -> bool:
    """Whether a role is an OpenAI-compatible server that runs already."""
    return backend.startswith(("http://", "https://"))


def is_kernel(backend: str) -> bool:
    """Whether a role is a kernel of the contract, published or given as ``module:function``."""
    return not is_url(backend) and (kernels.is_path(backend) or backend in kernels.published())


def check_backend(flag: str, name: str) -> None:
    """Refuse a backend that no server could run.

    Raises:
        UsageError: the name is unknown (with the list of known ones), or its kernel cannot be imported.
    """
    if is_url(name) or name in sglang_backends():
        return
    known = sorted({*sglang_backends(), *kernels.published()})
    if not kernels.is_path(name) and name not in kernels.published():
        near = difflib.get_close_matches(name, known, n=1)
        do = f"did you mean {near[0]!r}?" if near else "name one of these, a kernel as module:function, or a URL"
        raise UsageError(
            f"{flag} {name!r} is no attention backend that is known here.", f"one of {', '.join(known)}", do
        )
    try:
        kernels.load(name)
    except KernelRefused as error:
        raise UsageError(
            f"{flag}: {error}.", "a function that takes an AttentionCall", "check the path and PYTHONPATH"
        ) from None


def claimed_phases(name: str) -> tuple[str, ...]:
    """Phases that a backend's own kernel claims to compute; a backend of SGLang's own claims all, a URL none."""
    if is_url(name):
        return ()
    if is_kernel(name):
        return kernels.declaration(kernels.load(name)).phases
    return PHASES


def delegate_of(reference: str) -> str:
    """The backend that computes what a kernel leaves to another one: the reference; the device's default, as an empty name, where
    that is a server of its own or a kernel of the contract, which may leave the same phase open.
    """
    return "" if is_url(reference) or is_kernel(reference) else reference
