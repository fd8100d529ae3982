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
"""What the URL of a server looks like."""
LOOPBACK = ("localhost", "127.0.0.1", "::1")
"""Names of this machine in a URL."""
_Kind = Literal["url", "native", "kernel"]


def is_server_url(text: str) -> bool:
    """Return True if a text that begins like a URL has a host, if it has a port, a valid one, and no user, whose password would be
    recorded.
    """
    try:
        parts = urlsplit(text)
        return bool(parts.hostname) and parts.port != 0 and "@" not in parts.netloc
    except ValueError:  # of the port, or of the brackets of an IPv6 address
        return False


@dataclass(frozen=True)
class Backend:
    """The implementation of attention in one role.

    Parsing imports nothing. `phases` and `noise` import the kernel that declares them, and raise `KernelRefused` if that fails.

    Attributes:
        name: as given: a URL, a backend's name, a kernel's published name or its ``module:function``.
        kind: "url" for a running server, "native" for one of the engine's own backends, "kernel" for a kernel of the contract.
    """

    name: str
    kind: _Kind

    @classmethod
    def parse(cls, name: str) -> Backend:
        """Parse a backend's name. One that is neither a URL nor a kernel is taken for one of the engine's own backends."""
        if name.startswith(("http://", "https://")):
            return cls(name, "url")
        return cls(name, "kernel" if is_path(name) or name in published() else "native")

    @property
    def is_url(self) -> bool:
        """True if it is a running server, which assay can neither start nor instrument."""
        return self.kind == "url"

    @property
    def address(self) -> tuple[str, ...]:
        """Where a server is, the same for all URLs of one; a machine's own names are one."""
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
        """The path of a kernel given as ``module:function``; empty for a published name and for what is no kernel."""
        return self.name if is_path(self.name) else ""

    @property
    def phases(self) -> tuple[str, ...]:
        """Phases that it claims to compute: a kernel's declared ones, all for a native backend, none for a URL."""
        if self.is_url:
            return ()
        return self._declaration().phases if self.is_kernel else PHASES

    @property
    def noise(self) -> str:
        """Quantisation that a kernel declares, for example "int8_qk"; empty if its dtype's rounding is its only noise."""
        return self._declaration().noise if self.is_kernel else ""

    @property
    def features(self) -> tuple[str, ...]:
        """Features of calls that a kernel declares; see `assay.harness.attention.call.FEATURES`. None for what is no kernel."""
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
            KernelRefused: it is no kernel, or it cannot be imported.
        """
        from assay.harness.attention import kernels

        return kernels.load(self.name)

    def _declaration(self) -> Declaration:
        from assay.harness.attention.declaration import declaration

        return declaration(self.kernel())

    def __str__(self) -> str:
        return self.name
