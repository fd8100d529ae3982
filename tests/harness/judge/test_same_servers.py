from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from assay.harness.config import RunSpec
from assay.harness.evidence.fingerprint import Fingerprint, RopeTable, Tokens, Weight
from assay.harness.evidence.manifest import CommonSettings, ServerManifest
from assay.harness.judge import same_servers as rules
from assay.harness.judge.evidence import derived_arguments
from assay.harness.sides import ROLES, Role, Side
from assay.harness.statement import Statement, state
from assay.harness.verdict import Check
from assay.reports.wording.say import found_in

SPEC = RunSpec.of(reference="triton", candidate="mine")


def server(backend: str = "mine", phases: tuple[str, ...] = ("extend",), role: str = "candidate") -> ServerManifest:
    return ServerManifest(role=role, backend=backend, engine="e", claimed_phases=phases, arguments={"dtype": "float32"})


PAIR: dict[Role, ServerManifest] = {"reference": server("triton", role="reference"), "candidate": server()}


def checked(servers: Mapping[Role, ServerManifest], differences: Mapping[str, tuple[str, str]]) -> tuple[str, Statement]:
    check = rules.check_same_servers(SPEC.sides, servers, differences, {})
    return check.status, check.outcome


def test_same_servers() -> None:
    agree = state("servers-agree", stored=False, arguments=1, parts=None, derived=[], unknown=[], lost=[])
    assert checked(PAIR, {}) == ("ok", agree)
    differ = state("arguments-differ", arguments=[("dtype", "float32", "bfloat16")], asked=["backend"])
    assert checked(PAIR, {"dtype": ("float32", "bfloat16")}) == ("failed", differ)
    assert checked(PAIR | {"candidate": server("http://x", ())}, {}) == ("missing", state("not-started-by-assay"))
    assert checked({}, {}) == ("missing", state("not-both-started"))
    bare = {role: each.model_copy(update={"arguments": {}}) for role, each in PAIR.items()}
    assert checked(bare, {}) == ("missing", state("arguments-not-reported"))


@pytest.mark.parametrize(
    ("reference", "candidate", "one"),
    [
        ("http://127.0.0.1:30000/v1", "http://127.0.0.1:30000/v1", True),
        ("http://127.0.0.1:30000/v1", "http://localhost:30000/", True),
        ("http://host", "http://HOST:80", True),
        ("http://host", "https://host", False),
        ("http://127.0.0.1:30000", "http://127.0.0.1:30001", False),
        ("http://host/a", "http://host/b", False),
    ],
)
def test_one_url_on_both_sides_is_named(reference: str, candidate: str, one: bool) -> None:
    spec = RunSpec.of(reference=reference, candidate=candidate)
    servers: dict[Role, ServerManifest] = {role: server(spec.sides[role].backend, (), role) for role in ROLES}
    check = rules.check_same_servers(spec.sides, servers, {}, {})
    assert (check.status, check.outcome.id) == (("failed", "one-server") if one else ("missing", "not-started-by-assay"))


def test_the_arguments_and_records_that_another_version_lacks_are_said() -> None:
    derived = {"new_flag": ("null", "absent"), "old_flag": ("absent", "false"), "other": ("1", "2")}
    told: dict[Role, Fingerprint] = {role: served(role, config={"a": "1"}) for role in ROLES}
    told["reference"] = served("reference", config={"a": "1"}, packages={"torch": "2"})
    check = rules.check_same_servers(SPEC.sides, PAIR, {}, told, derived=derived)
    assert check.status == "ok"
    said = found_in(check.outcome).found
    assert "the reference has no old_flag; the candidate has no new_flag" in said
    assert "packages not compared, as one of them does not report it" in said


def test_a_flag_that_was_asked_to_differ_must_differ_in_the_servers() -> None:
    sides = (Side(backend="triton", flags=flags) for flags in ((), ("--page-size=16",)))
    spec = RunSpec(**dict(zip(ROLES, sides, strict=True)))
    same = {role: server("triton", role=role).model_copy(update={"arguments": {"page_size": 1}}) for role in ROLES}
    check = rules.check_same_servers(spec.sides, same, {}, {})
    assert (check.status, check.outcome) == ("failed", state("flags-ignored", flags=["--page-size"]))
    other = same["candidate"].model_copy(update={"arguments": {"page_size": 16}})
    assert rules.check_same_servers(spec.sides, same | {"candidate": other}, {}, {}).status == "ok"


def served(role: Role, **parts: object) -> Fingerprint:
    return Fingerprint(source="server", engine="e", model="m", asked={"backend": role}, **parts)  # type: ignore[arg-type]


def test_what_was_served_decides_too_and_makes_no_check_milder() -> None:
    def check(fingerprints: Mapping[Role, Fingerprint], **differences: tuple[str, str]) -> Check:
        return rules.check_same_servers(SPEC.sides, PAIR, differences, fingerprints)

    same = {role: served(role, tokens=Tokens(bare={"a": (1,)}), packages={"torch": "2"}) for role in ROLES}
    assert (check(same).status, check(same).outcome.values["parts"]) == ("ok", 2)
    other = {**same, "candidate": served("candidate", tokens=Tokens(bare={"a": (2,)}), packages={"torch": "2"})}
    said = ["token ids differ in 1 of 1 text of the corpus"]
    assert (check(other).status, check(other).outcome) == ("failed", state("served-otherwise", said=said))
    assert check(same, dtype=("a", "b")) == check({}, dtype=("a", "b"))
    assert check(same, dtype=("a", "b")).status == "failed"
    unread = same["candidate"].model_copy(update={"not_observed": {"config": "KeyError: 'x'"}})
    found = check({**same, "candidate": unread})
    assert (found.status, found.outcome) == ("missing", state("settings-not-compared", why="A: not observed; B: KeyError: 'x'"))
    alone = check({"reference": same["reference"]})
    assert (alone.status, alone.outcome.values["parts"]) == ("ok", None)


FORCED = CommonSettings(because=("both were given it",), impossible=("dtype (a; b)",))


@pytest.mark.parametrize(("differences", "impossible"), [({}, []), ({"dtype": ("a", "b")}, ["dtype (a; b)"])])
def test_the_check_says_what_both_were_given(differences: dict[str, tuple[str, str]], impossible: list[str]) -> None:
    plain, given = (rules.check_same_servers(SPEC.sides, PAIR, differences, {}, common=each) for each in (None, FORCED))
    found = state("with-common-settings", outcome=plain.outcome, because=FORCED.because, impossible=impossible)
    assert (given.status, given.outcome) == (plain.status, found)


def test_two_models_of_a_run_may_have_most_weights_in_common() -> None:
    kept = tuple(Weight(name=name, shape=(1,), dtype="float32", digest=name) for name in ("a", "b", "c"))
    merged = (kept[0].model_copy(update={"digest": "other"}), *kept[1:])
    for model, status in (("m", "failed"), ("merged", "ok")):
        sides: dict[Role, Fingerprint] = {
            "reference": served("reference", weights=kept),
            "candidate": served("candidate", weights=merged).model_copy(update={"model": model}),
        }
        assert rules.check_same_servers(SPEC.sides, PAIR, {}, sides).status == status


@pytest.mark.parametrize(
    ("changed", "status"),
    [
        ({"packages": ("transformers==5.3",)}, "missing"),
        ({"interpreter": "/env/bin/python"}, "missing"),
        ({"model": "other"}, "missing"),
        ({"flags": ("--page-size=16",)}, "failed"),
    ],
)
def test_what_an_environment_or_a_model_brings_does_not_excuse_a_shown_loss(changed: dict[str, Any], status: str) -> None:
    """A failed check makes a regression inconclusive; a missing one only forbids a pass."""
    reference = Side(backend="triton")
    spec = RunSpec(reference=reference, candidate=reference.model_copy(update=changed))
    servers = {role: server("triton", role=role) for role in ROLES}
    sides = {role: served(role, tokens=Tokens(bare={"a": (id_,)})) for role, id_ in zip(ROLES, (1, 2), strict=True)}
    check = rules.check_same_servers(spec.sides, servers, {}, sides)
    assert (check.status, check.outcome.id) == (status, "served-otherwise")


def test_a_reference_that_contradicts_its_own_model_shows_no_loss() -> None:
    spec = RunSpec.of(reference="hf", reference_with=("transformers==5.3",), candidate="triton")
    servers = {role: server(spec.sides[role].backend, role=role) for role in ROLES}

    def table(wrong: str) -> RopeTable:
        return RopeTable(name="rope", kind="R", dtype="float32", frequencies=(1.0,), digest="", wrong=wrong)

    for faulty, status in (("reference", "failed"), ("candidate", "missing")):
        sides = {role: served(role, rope=(table("rope_theta is 15,000" if role == faulty else ""),)) for role in ROLES}
        check = rules.check_same_servers(spec.sides, servers, {}, sides)
        said = f"{'A' if faulty == 'reference' else 'B'}: rope_theta is 15,000"
        assert (check.status, check.outcome) == (status, state("served-otherwise", said=[said]))


def test_a_witness_may_compute_in_another_dtype_than_the_candidate() -> None:
    for reference, status in (("hf", "ok"), ("triton", "failed")):
        spec = RunSpec.of(reference=reference, candidate="torch_native")
        servers = {role: server(spec.sides[role].backend, role=role) for role in ROLES}
        dtypes = zip(ROLES, ("float32", "bfloat16"), strict=True)
        sides = {role: served(role, quantisation={"weights": dtype}) for role, dtype in dtypes}
        assert rules.check_same_servers(spec.sides, servers, {}, sides).status == status


def test_hidden_values_are_not_taken_for_the_same() -> None:
    sides = (Side(backend="triton", flags=(f"--ssl-keyfile-password={value}",)) for value in "12")
    spec = RunSpec(**dict(zip(ROLES, sides, strict=True))).recorded()
    told = {"arguments": {"ssl_keyfile_password": "***"}}
    same = {role: server("triton", role=role).model_copy(update=told) for role in ROLES}
    assert rules.check_same_servers(spec.sides, same, {}, {}).status == "ok"


@pytest.mark.parametrize(
    ("resolved", "derived"),
    [
        ({"graphs": {"max": 64}}, {"graphs.max"}),
        ({"graphs": {"max": 256}}, set()),  # the engine resolves the command line otherwise
        ({}, set()),
    ],
)
def test_what_the_engine_resolves_a_side_to_follows_from_the_treatment(
    resolved: dict[str, dict[str, object]], derived: set[str]
) -> None:
    differ = {"graphs.max": ("256", "64")}
    sides: dict[Role, dict[str, object]] = {"reference": {"graphs": {"max": 256}}, "candidate": resolved} if resolved else {}
    assert set(derived_arguments(differ, sides, dict.fromkeys(ROLES, "sglang"))) == derived


def test_nothing_is_derived_where_a_server_did_not_start() -> None:
    resolved: dict[Role, dict[str, object]] = {role: {"page_size": 1} for role in ROLES}
    assert derived_arguments({}, resolved, {"candidate": "sglang"}) == {}
