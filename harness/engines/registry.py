"""The registry of engines: what neutral rooms need to know of an engine, found by its name.

An engine is a package of `assay.harness.engines` with the modules that the protocols below describe; `assay.harness.sides.ENGINES`
lists them. Nothing outside the packages names an engine's module, so another engine touches its own package and that list.
`assay.harness.engines.launch.launching` and `assay.harness.engines.launched.server` find the modules that start a server.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

from assay.harness.attention.noise import BESIDE_FP8, family
from assay.harness.attention.published import native_backend, published
from assay.harness.backend import URL_FORM, Backend, is_server_url
from assay.harness.errors import UsageError
from assay.harness.evidence import baseline
from assay.harness.evidence.envelope import EngineLimits
from assay.harness.extras import meets
from assay.harness.sides import Device, Engine, hide, profile_of
from assay.harness.text import did_you_mean

if TYPE_CHECKING:
    import torch

    from assay.harness.attention.call import AttentionCall
    from assay.harness.attention.declaration import Declaration
    from assay.harness.engines.features import Feature


class Arguments(Protocol):
    """``arguments``: a server's arguments, in the engine's own names."""

    def settled(self, info: Mapping[str, Any], /) -> dict[str, Any]:
        """Reduce what a server tells to the arguments that stay the same while it runs, without its secrets."""

    def flat(self, arguments: Mapping[str, Any], /) -> dict[str, str]:
        """Return a server's arguments leaf by leaf, named with dots, without its identity and its state."""

    def differences(
        self, reference: Mapping[str, Any], candidate: Mapping[str, Any], asked: Collection[str] = (), /
    ) -> dict[str, tuple[str, str]]:
        """Return the arguments that differ beyond the settings `asked` to differ: (reference, candidate) by name."""

    def limits_of(self, arguments: Mapping[str, Any], context: int, /) -> EngineLimits:
        """Return a server's limits; `context` is the model's, in tokens."""

    def numerics(self, arguments: Mapping[str, Any], /) -> dict[str, str]:
        """Return what decides the numbers of any engine, in neutral names: dtype, KV cache dtype, quantization and ranks."""


class Features(Protocol):
    """``features``: what an engine can switch that should not affect outputs."""

    DERIVED: tuple[str, ...]
    """Differences between two servers that follow from features, as ``assay compare --allow`` names them."""

    def features_of(self, device: Device, /) -> dict[str, Feature]:
        """Return all features by id, in the order in which they are listed."""

    def with_models(self, flags: tuple[str, ...], model: Path, folder: Path, /) -> tuple[str, ...]:
        """Put folders into flags that need models made for the server's own one, which are written into its folder."""


@dataclass(frozen=True)
class LayerRequest:
    """A request of a layer to a backend, beyond the contract.

    Attributes:
        stored: dtype of the KV pool, by default that of k and v.
        scales: factors of stored K and stored V, or None.
        drafts: whether the new tokens are a chain of drafts to verify: equally many for each sequence.
    """

    stored: torch.dtype | None = None
    scales: tuple[float, float] | None = None
    drafts: bool = False


class NativeKernel(Protocol):
    """One of an engine's own attention backends as a kernel of the contract.

    Attributes:
        assay: its declaration.
        backend: the backend's name in the engine.
    """

    assay: Declaration
    backend: str

    def attempt(self, call: AttentionCall, layer: LayerRequest, /) -> torch.Tensor:
        """Have the backend compute a call for a layer. Raises anything that the backend raises."""


class _NativeKernels(Protocol):
    """``native_kernel``: the engine's own attention backends, without a server. `LATENT_PAGES` has those of latents alone."""

    LATENT_PAGES: Mapping[str, int]

    def kernel(self, backend: str, /) -> NativeKernel:
        """Make the kernel of a backend, and try it. Raises KernelRefused or ImportError."""

    def version(self) -> str:
        """Return the engine's version. Raises ImportError if it is not installed."""


def arguments(engine: Engine) -> Arguments:
    """Return the module with an engine's arguments."""
    return cast(Arguments, module(engine, "arguments"))


def backends(engine: Engine) -> tuple[str, ...]:
    """List an engine's own attention backends. Raises UsageError if they cannot be found here."""
    return profile_of(engine).backends or cast("tuple[str, ...]", module(engine, "catalog").backends())


def check_version(engine: Engine) -> str:
    """Return an engine's version in this environment, or an empty string for a checkout on the path, which has none.

    Raises:
        UsageError: it is too old, or not installed.
    """
    profile = profile_of(engine)
    least = f"{profile.title} {profile.oldest} or newer"
    for name in profile.distributions:
        with suppress(PackageNotFoundError):
            here = version(name)
            if meets(here, f">={profile.oldest}"):
                return here
            raise UsageError(f"{profile.title} {here} is too old.", least, f"install {least}")
    if find_spec(profile.distributions[0]) is not None:
        return ""
    raise UsageError(
        f"{profile.title} is not installed in the environment that runs assay.",
        f"the package {' or '.join(profile.distributions)}, {profile.oldest} or newer",
        profile.install,
    )


def native_noise(engine: Engine, names: Collection[str], phase: str, stored: bool) -> str:
    """Return the noise family of an engine's own backends, beyond the rounding of the call's dtype, or an empty string.

    Any of the named backends may have computed the call; `stored` says whether the KV cache stores fewer bits than it has.
    """
    profile = profile_of(engine)
    merged = phase == "extend" and any(name in profile.merging for name in names)
    beside = stored and not all(name in profile.exact_weights for name in names)
    return replace(family(BESIDE_FP8 if beside else ""), merged=merged).name


def native_kernels(engine: Engine) -> _NativeKernels:
    """Return the module with an engine's own attention backends as kernels."""
    return cast(_NativeKernels, module(engine, "native_kernel"))


def features(engine: Engine) -> Features:
    """Return the module with an engine's features."""
    return cast(Features, module(engine, "features"))


def probed(engine: Engine) -> bool:
    """Return True if an engine's servers can be asked the probes: it then lists its features."""
    return _has(engine, "features")


def _has(engine: Engine, name: str) -> bool:
    return find_spec(f"assay.harness.engines.{engine}.{name}") is not None


def module(engine: Engine, name: str) -> Any:
    """Import a module of an engine's package. Raises UsageError if it has none: assay cannot look into that engine."""
    path = f"assay.harness.engines.{engine}.{name}"
    try:
        return import_module(path)
    except ModuleNotFoundError as error:
        if error.name != path:
            raise
        raise UsageError(
            f"{profile_of(engine).title} as an engine has no {name.replace('_', ' ')}.",
            "an engine that assay instruments",
            "name another --engine: hf serves as the reference of assay run",
        ) from None


def checked_backend(engine: Engine, flag: str, name: str) -> Backend:
    """Check that an engine's server can run a backend of this name, which `flag` gave, and return it.

    Raises:
        UsageError: the name is unknown, its kernel cannot be imported, or it names a backend without a server.
    """
    if native := native_backend(name):
        raise UsageError(
            f"{flag}: {name} is a backend without a server.",
            "an attention backend of a server",
            f"name it {native[1].partition('@')[0]}",
        )
    backend = Backend.parse(name)
    if backend.is_url and not is_server_url(name):
        raise UsageError(f"{flag}: {hide('', name)} is not the URL of a server.", URL_FORM, "correct the URL")
    if name in (own := backends(engine)) or (backend.is_url and profile_of(engine).instrumented):
        return backend
    if not profile_of(engine).instrumented:
        raise UsageError(
            f"{flag}: {profile_of(engine).title} has no attention backend {name!r}.",
            f"one of {', '.join(own)}",
            f"give {flag}={own[0]}, or name the engine that has {name}",
        )
    if not backend.is_kernel and not name.endswith(".py") and ("/" in name or Path(name).is_dir()):
        near = next((f"name {path.parent}" for path in sorted(Path(name).glob(f"*/{baseline.FILE}"))), "check the path")
        raise UsageError(
            f"{flag}: {name} {'is not a baseline: it has no ' + baseline.FILE if Path(name).exists() else 'does not exist'}.",
            "the folder of a baseline, a backend, a kernel as module:function, or a URL",
            f"{near}; assay gate accept RUN writes a baseline",
        )
    if not backend.is_kernel:
        known = sorted({*own, *published()})
        do = (
            did_you_mean(name, known)
            or "name one of these, a kernel as module:function, a URL, or the folder of a baseline"
        )
        raise UsageError(f"{flag}: unknown attention backend {name!r}.", f"one of {', '.join(known)}", do)
    from assay.harness.attention import kernels

    kernels.find(flag, name)
    return backend
