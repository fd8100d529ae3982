from __future__ import annotations

from assay.harness.config import RunSpec
from assay.harness.evidence.fingerprint import Fingerprint, Tokens, Weight
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
    bare = {role: each.model_copy(update={"arguments": {}}) for role, each in pair.items()}
    assert rules.check_same_servers(SPEC.sides, bare, {}).found == "neither server reported its arguments"


def test_a_flag_that_was_asked_to_differ_must_differ_in_the_servers() -> None:
    sides = (Side(backend="triton", flags=flags) for flags in ((), ("--page-size=16",)))
    spec = RunSpec(**dict(zip(ROLES, sides, strict=True)))
    same = {role: server("triton", role=role).model_copy(update={"arguments": {"page_size": 1}}) for role in ROLES}
    check = rules.check_same_servers(spec.sides, same, {})
    assert (check.status, check.found) == ("failed", "both servers report the same --page-size, which was asked to differ")
    other = same["candidate"].model_copy(update={"arguments": {"page_size": 16}})
    assert rules.check_same_servers(spec.sides, same | {"candidate": other}, {}).status == "ok"


def served(role: Role, **parts: object) -> Fingerprint:
    return Fingerprint(source="server", engine="e", model="m", asked={"backend": role}, **parts)  # type: ignore[arg-type]


def test_what_was_served_decides_too_and_makes_no_check_milder() -> None:
    pair: dict[Role, ServerManifest] = {"reference": server("triton", role="reference"), "candidate": server()}
    ok, failed = (rules.check_same_servers(SPEC.sides, pair, other) for other in ({}, {"dtype": ("a", "b")}))
    same = {role: served(role, tokens=Tokens(bare={"a": (1,)}), packages={"torch": "2"}) for role in ROLES}
    assert rules.with_fingerprints(ok, same).found.endswith("; what they served agrees in 2 parts")
    other = {**same, "candidate": served("candidate", tokens=Tokens(bare={"a": (2,)}), packages={"torch": "2"})}
    check = rules.with_fingerprints(ok, other)
    assert check.status == "failed"
    assert check.found.endswith("token ids differ in 1 of 1 text of the corpus")
    assert rules.with_fingerprints(failed, same) == failed
    alone = rules.with_fingerprints(ok, {"reference": same["reference"]})
    assert (alone.status, alone.found) == ("ok", f"{ok.found}; what they served was not observed")


def test_two_models_of_a_run_may_have_most_weights_in_common() -> None:
    pair: dict[Role, ServerManifest] = {"reference": server("triton", role="reference"), "candidate": server()}
    ok = rules.check_same_servers(SPEC.sides, pair, {})
    kept = tuple(Weight(name=name, shape=(1,), dtype="float32", digest=name) for name in ("a", "b", "c"))
    merged = (kept[0].model_copy(update={"digest": "other"}), *kept[1:])
    for model, status in (("m", "failed"), ("merged", "ok")):
        sides = {
            "reference": served("reference", weights=kept),
            "candidate": served("candidate", weights=merged).model_copy(update={"model": model}),
        }
        assert rules.with_fingerprints(ok, sides).status == status


def test_hidden_values_are_not_taken_for_the_same() -> None:
    sides = (Side(backend="triton", flags=(f"--ssl-keyfile-password={value}",)) for value in "12")
    spec = RunSpec(**dict(zip(ROLES, sides, strict=True))).recorded()
    told = {"arguments": {"ssl_keyfile_password": "***"}}
    same = {role: server("triton", role=role).model_copy(update=told) for role in ROLES}
    assert rules.check_same_servers(spec.sides, same, {}).status == "ok"
