"""A backend, parsed from its name: the URL of a running server, one of the engine's own backends, or a kernel of the contract."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal
from urllib.parse import urlsplit

from assay.harness.attention.published import is_path, published
from assay.harness.conditions import PHASES

if TYPE_CHECKING:
    from assay.harness.attention.call import Kernel
    from assay.harness.attention.declaration import Declaration

URL_FORM = "http://HOST:PORT or https://HOST"
"""The form of a server's URL."""
LOOPBACK = ("localhost", "127.0.0.1", "::1")
"""Names of this machine in a URL."""
_Kind = Literal["url", "native", "kernel"]


def is_server_url(text: str) -> bool:
    """Return True if a text that begins like a URL has a host, a valid port if any, and no user (a password would be recorded)."""
    try:
        parts = urlsplit(text)
        return bool(parts.hostname) and parts.port != 0 and "@" not in parts.netloc
    except ValueError:  # of the port, or of the brackets of an IPv6 address
        return False


@dataclass(frozen=True)
class Backend:
    """The attention implementation of one role.

    Parsing imports nothing. `phases` and `noise` import the kernel that declares them, and raise `KernelRefused` if that fails.

    Attributes:
        name: as given: a URL, a backend's name, a kernel's published name or its ``module:function``.
        kind: "url" for a running server, "native" for one of the engine's own backends, "kernel" for a kernel of the contract.
    """

    name: str
    kind: _Kind

    @classmethod
    def parse(cls, name: str) -> Backend:
        """Parse a backend's name. A name that is neither a URL nor a kernel is assumed to be one of the engine's own backends."""
        if name.startswith(("http://", "https://")):
            return cls(name, "url")
        return cls(name, "kernel" if is_path(name) or name in published() else "native")

    @property
    def is_url(self) -> bool:
        """True if it is a running server, which assay can neither start nor instrument."""
        return self.kind == "url"

    @property
    def address(self) -> tuple[str, ...]:
        """The address of a server, equal for all its URLs; all names of this machine are equal."""
        parts = urlsplit(self.name)
        host = "localhost" if parts.hostname in LOOPBACK else parts.hostname
        port = parts.port or {"http": 80, "https": 443}.get(parts.scheme)
        return parts.scheme, f"{host}:{port}", parts.path.rstrip("/").removesuffix("/v1")

    @property
    def is_kernel(self) -> bool:
        """True if it is a kernel of the contract."""
        return self.kind == "kernel"

    @property
    def path(self) -> str:
        """The path of a kernel given as ``module:function``, or an empty string for a published name or anything else."""
        return self.name if is_path(self.name) else ""

    @property
    def phases(self) -> tuple[str, ...]:
        """The phases that it claims to compute: a kernel's declared ones, all for a native backend, none for a URL."""
        if self.is_url:
            return ()
        return self._declaration().phases if self.is_kernel else PHASES

    @property
    def noise(self) -> str:
        """The quantisation that a kernel declares, such as "int8_qk"; an empty string means that its dtype's rounding is all."""
        return self._declaration().noise if self.is_kernel else ""

    @property
    def features(self) -> tuple[str, ...]:
        """The call features that a kernel declares (`assay.harness.attention.call.FEATURES`); empty for anything but a kernel."""
        return self._declaration().features if self.is_kernel else ()

    @property
    def delegate(self) -> str:
        """If this is the reference: the native backend to which a kernel of either role delegates the phases that it lacks.

        Empty, for the device's default, if the reference is a URL or a kernel, which may lack the same phase.
        """
        return self.name if self.kind == "native" else ""

    def kernel(self) -> Kernel:
        """Import the kernel itself.

        Raises:
            KernelRefused: it is not a kernel, or it cannot be imported.
        """
        from assay.harness.attention import kernels

        return kernels.load(self.name)

    def _declaration(self) -> Declaration:
        from assay.harness.attention.declaration import declaration

        return declaration(self.kernel())

    def __str__(self) -> str:
        return self.name
