"""What a run does before it asks anything, with stand-ins for its servers."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from assay.harness.engines.model import TINY_MODEL
from assay.harness.errors import ChangedError, EngineError
from assay.harness.evidence.fingerprint import FINGERPRINT, Fingerprint
from assay.harness.run import collect
from assay.harness.sides import ROLES, Role, Side


class Server:
    """A server that tells a fingerprint, or none."""

    def __init__(self, role: Role, torch: str) -> None:
        self.role, self.stopped = role, False
        self._torch = torch

    def fingerprint(self) -> Fingerprint | None:
        made = Fingerprint(source="server", engine="e", model=str(TINY_MODEL), config={}, packages={"torch": self._torch})
        return made if self._torch else None

    def stop(self) -> None:
        self.stopped = True


def asked(tmp_path: Path, accepted: str = "") -> Any:
    spec = SimpleNamespace(
        sides={role: Side(backend=role, model="m") for role in ROLES},
        policy=SimpleNamespace(fingerprint=accepted),
        treatment={"backend": ROLES},
    )
    folder = SimpleNamespace(nonce="a-run", server_folder=lambda role: tmp_path / role)
    return SimpleNamespace(plan=SimpleNamespace(spec=spec), folder=folder)


def taken(servers: list[Server], asked_of: Any) -> None:
    collect._take_fingerprints(servers, asked_of)  # type: ignore[arg-type]


def test_what_each_server_serves_is_recorded_with_what_was_asked_for(tmp_path: Path) -> None:
    taken([Server("reference", "2"), Server("candidate", "")], asked(tmp_path))
    made = FINGERPRINT.read(tmp_path / "reference", "a-run")
    assert made is not None
    assert (made.model, made.asked["backend"], made.packages) == ("m", "reference", {"torch": "2"})
    assert FINGERPRINT.read(tmp_path / "candidate") is None


def test_a_candidate_without_a_fingerprint_is_not_the_accepted_one(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="did not report a fingerprint"):
        taken([Server("reference", "2"), Server("candidate", "")], asked(tmp_path, str(tmp_path / "accepted.json")))


@pytest.mark.parametrize(("candidate", "accepts"), [("2", True), ("3", False)])
def test_a_candidate_that_was_not_accepted_ends_the_run_before_anything_is_asked(
    tmp_path: Path, candidate: str, accepts: bool
) -> None:
    accepted = tmp_path / "accepted.json"
    accepted.write_text(Fingerprint(source="server", engine="e", model="m", config={}, packages={"torch": "2"}).model_dump_json())
    servers = [Server("reference", "9"), Server("candidate", candidate)]
    if accepts:
        taken(servers, asked(tmp_path, str(accepted)))
        return
    with pytest.raises(ChangedError, match=r"torch is 2 in A, 3 in B"):
        taken(servers, asked(tmp_path, str(accepted)))
    assert all(server.stopped for server in servers)
    assert FINGERPRINT.read(tmp_path / "candidate") is not None  # it stays as evidence
