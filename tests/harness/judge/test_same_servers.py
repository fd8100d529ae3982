from __future__ import annotations

from assay.harness.config import RunSpec
from assay.harness.evidence.manifest import ServerManifest
from assay.harness.judge import same_servers as rules
from assay.harness.sides import ROLES, Role, Side

SPEC = RunSpec.of(reference="triton", candidate="mine")


def server(backend: str = "mine", phases: tuple[str, ...] = ("extend",), role: str = "candidate") -> ServerManifest:
    return ServerManifest(role=role, backend=backend, engine="e", claimed_phases=phases, arguments={"dtype": "float32"})


def test_same_servers() -> None:
    pair: dict[Role, ServerManifest] = {"reference": server("triton", role="reference"), "candidate": server()}
    assert rules.check_same_servers(SPEC.sides, pair, {}).status == "ok"
    differing = rules.check_same_servers(SPEC.sides, pair, {"dtype": ("float32", "bfloat16")})
    assert (differing.status, differing.found) == ("failed", "dtype: float32 against bfloat16")
    assert rules.check_same_servers(SPEC.sides, pair | {"candidate": server("http://x", ())}, {}).status == "missing"
    assert rules.check_same_servers(SPEC.sides, {}, {}).status == "missing"


def test_a_flag_that_was_asked_to_differ_must_differ_in_the_servers() -> None:
    sides = (Side(backend="triton", flags=flags) for flags in ((), ("--page-size=16",)))
    spec = RunSpec(**dict(zip(ROLES, sides, strict=True)))
    same = {role: server("triton", role=role).model_copy(update={"arguments": {"page_size": 1}}) for role in ROLES}
    check = rules.check_same_servers(spec.sides, same, {})
    assert (check.status, check.found) == ("failed", "both servers report the same --page-size, which was asked to differ")
    other = same["candidate"].model_copy(update={"arguments": {"page_size": 16}})
    assert rules.check_same_servers(spec.sides, same | {"candidate": other}, {}).status == "ok"
