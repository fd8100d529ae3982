"""Baselines: which matches, what is stale, what got worse, and that nothing worse is accepted silently."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch

from assay.harness.config import RunSpec, make_spec
from assay.harness.engines.inside.shadow import LayerSums
from assay.harness.errors import EvidenceError, UsageError
from assay.harness.evidence.baseline import FILE, Baseline, Key, read_all, read_answers, write_baseline
from assay.harness.evidence.error_table import condition_numbers
from assay.harness.evidence.fingerprint import FINGERPRINT, Fingerprint
from assay.harness.evidence.folder import RunFolder
from assay.harness.evidence.layer_diff_record import with_roles_exchanged
from assay.harness.evidence.manifest import ServerManifest
from assay.harness.evidence.shadow_errors import ShadowErrors, ShadowHeader
from assay.harness.judge.accepted import _check_baselines, _compare_accepted
from assay.harness.judge.answers import Pair
from assay.harness.judge.baselines import (
    Proposal,
    Status,
    _find,
    _key_of,
    _make,
    _own_errors_by_condition,
    _read_all,
    accept,
    attach_baselines,
    envelope_seed,
    propose,
    status_of,
    with_stored_reference,
)
from assay.harness.judge.build import build
from assay.harness.judge.paired_accuracy import Rule, accuracy_of
from assay.harness.run.plan import Plan, prepare
from assay.harness.run.run_folder import asked_roles, open_folder
from assay.harness.sides import ROLES, Role, Side
from assay.harness.statement import state
from assay.harness.verdict import Check


def key(backend: str = "mine", engine: str = "SGLang 1 on cpu") -> Key:
    return Key(
        engine=engine, backend=backend, model_hash="m" * 64, hardware="a machine", flags=("--page-size=16",), items_hash="i"
    )  # fmt: skip


def baseline(of: Key, accuracy: float = 0.9, own: dict[str, float] | None = None) -> Baseline:
    server = ServerManifest(role="candidate", backend=of.backend, engine=of.engine, claimed_phases=("extend",))
    return Baseline(
        key=of, side=Side(backend=of.backend), accepted="2026-01-01T00:00:00Z", run_id="r", git="", numbers={"accuracy": accuracy},
        own_errors=own or {}, server=server,
    )  # fmt: skip


def test_a_baseline_matches_if_its_complete_key_does() -> None:
    keys: dict[Role, Key] = {"reference": key("torch_native"), "candidate": key()}
    stored = [baseline(key()), baseline(key("torch_native", "SGLang 0 on cpu")), baseline(key("other"))]
    status = _find(keys, {one.key.name: one for one in stored})
    assert status.used == {"candidate": key().name}
    assert status.stale == {"reference": (("engine", "SGLang 0 on cpu", "SGLang 1 on cpu"),)}
    assert set(status.unused) == {key("torch_native", "SGLang 0 on cpu").name, key("other").name}


@pytest.mark.parametrize("field", ["engine", "model_hash", "hardware", "items_hash", "interpreter"])
def test_each_part_of_the_key_makes_a_baseline_stale(field: str) -> None:
    other = key().model_copy(update={field: "x"})
    status = _find({"candidate": key()}, {other.name: baseline(other)})
    assert [name for name, _, _ in status.stale["candidate"]] == [field]
    assert not status.used


@pytest.mark.parametrize("fails_at", [1, 2])
def test_a_baseline_stays_if_writing_its_successor_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails_at: int) -> None:
    write_baseline(tmp_path, baseline(key(), 0.8), [])
    calls = 0

    def replace_until_full(old: Path, new: Path) -> None:
        nonlocal calls
        calls += 1
        if calls >= fails_at:
            raise OSError(28, "No space left on device")
        Path(old).rename(new)

    monkeypatch.setattr(os, "replace", replace_until_full)
    with pytest.raises(EvidenceError, match="No space left"):
        write_baseline(tmp_path, baseline(key(), 0.9), [])
    assert [one.numbers["accuracy"] for one in read_all(tmp_path)[0].values()] == [0.8]


def checked(status: Status) -> Check:
    spec = make_spec({"candidate": "mine:f"})
    (only,) = _check_baselines(spec.sides, spec.policy, status)
    return only


def test_a_stale_baseline_forbids_a_pass_and_a_missing_one_does_not() -> None:
    fits = checked(Status(used={"candidate": "mine-1"}, unused=("old-2",)))
    assert (fits.status, fits.outcome) == ("ok", state("baseline-matches", name="mine-1", unused=["old-2"], damaged=[]))
    stale = checked(Status(stale={"candidate": (("engine", "a", "b"),)}))
    assert (stale.status, stale.outcome.id, stale.outcome.values["differs"]) == (
        "missing",
        "baseline-stale",
        [["engine", "a", "b"]],
    )
    none = checked(Status())
    assert (none.status, none.outcome) == ("not checked", state("no-baseline-accepted", backend="mine:f", unused=[], damaged=[]))


def test_a_baseline_is_read_as_it_was_written_and_replaces_the_old_one(tmp_path: Path) -> None:
    write_baseline(tmp_path, baseline(key(), 0.8), [])
    write_baseline(tmp_path, baseline(key(), 0.9), [])
    (only,) = read_all(tmp_path)[0].values()
    assert only.numbers == {"accuracy": 0.9}
    assert [path.name for path in tmp_path.iterdir()] == [key().name]
    another = baseline(key().model_copy(update={"backend": "another"}), 0.9)
    (write_baseline(tmp_path, another, []) / FILE).write_text("{}")
    assert _read_all(tmp_path, [key()]) == ({key().name: only}, (another.key.name,)), "it hides no other"
    for needed in (another.key, another.key.model_copy(update={"items_hash": "of another version of it"})):
        with pytest.raises(EvidenceError, match="is damaged"):
            _read_all(tmp_path, [key(), needed])


def test_worse_means_less_accurate_more_error_or_no_longer_measured() -> None:
    before = baseline(key(), 0.9, {"layer 0": 0.01, "layer 1": 0.02, "layer 2": 0.03})
    now = baseline(key(), 0.89, {"layer 0": 0.01001, "layer 1": 0.03, "layer 3": 0.5})
    worse = {change.name for change in Proposal("candidate", now, before).changes if change.worse}
    assert worse == {"accuracy", "layer 1", "layer 2"}
    assert not any(change.worse for change in Proposal("candidate", now, None).changes)


POLICY = make_spec({"growth": 1.5}).policy


def test_an_own_error_that_is_no_longer_finite_is_worse() -> None:
    proposal = Proposal("candidate", baseline(key(), own={"l": float("nan")}), baseline(key(), own={"l": 0.1}))
    assert {change.name for change in proposal.changes if change.worse} == {"l"}


def test_growth_of_own_error_is_compared_with_the_policy() -> None:
    assert _compare_accepted(None, {"a": 0.01}, {"a": 0.0149}, POLICY, synthetic=True).verdict == "pass"
    grown = _compare_accepted(None, {"a": 0.01, "b": 0.02}, {"a": 0.0151, "b": 0.02}, POLICY, synthetic=True)
    assert (grown.verdict, grown.why[-1]) == ("regression", state("policy", lines=["growth = 1.5 (--growth)"]))
    assert grown.why[0].values["where"] == "a"
    assert _compare_accepted(None, {"a": 0.01}, {"a": float("nan")}, POLICY, synthetic=True).verdict == "regression"
    assert _compare_accepted(None, {"a": 1e-9}, {"a": 9e-9}, POLICY, synthetic=True).verdict == "pass", "rounding does not grow"
    assert _compare_accepted(None, {"a": 0.01}, {"b": 0.01}, POLICY, synthetic=True).verdict == "inconclusive"


RULE = Rule(margin=0.05, alpha=0.05, regression_alpha=0.01, population=None)


@pytest.mark.parametrize(("lost", "verdict"), [(0, "pass"), (60, "regression")])
def test_answers_are_compared_with_the_accepted_ones(lost: int, verdict: str, paired: Callable[..., list[Pair]]) -> None:
    decision = accuracy_of(paired(200 - lost, lost), RULE)
    assert _compare_accepted(decision, {}, {}, POLICY, synthetic=True).verdict == verdict


def test_too_few_common_answers_pass_only_beside_a_non_inferior_run(paired: Callable[..., list[Pair]]) -> None:
    few, worse = accuracy_of(paired(20, 1), RULE), accuracy_of(paired(0, 30), RULE)
    assert _compare_accepted(few, {}, {}, POLICY, synthetic=True).verdict == "inconclusive"
    assert _compare_accepted(few, {}, {}, POLICY, non_inferior=True, synthetic=True).verdict == "pass"
    assert _compare_accepted(worse, {}, {}, POLICY, non_inferior=True, synthetic=True).verdict == "regression"


@pytest.mark.parametrize(
    ("lost", "own_error", "decided_by"),
    [
        (0, 0.01, "loss-since-accepted"), (0, 0.5, "own-error-growth"), (60, 0.01, "loss-since-accepted"),
        (60, 0.5, "loss-since-accepted"), (None, 0.01, "own-error-growth"), (None, 0.5, "own-error-growth"),
    ],
)  # fmt: skip
def test_the_metric_that_decided_is_named(
    lost: int | None, own_error: float, decided_by: str, paired: Callable[..., list[Pair]]
) -> None:
    decision = None if lost is None else accuracy_of(paired(200 - lost, lost), RULE)
    compared = _compare_accepted(decision, {"a": 0.01}, {"a": own_error}, POLICY, synthetic=True)
    assert (compared.decided_by, compared.verdict == "regression") == (decided_by, lost == 60 or own_error == 0.5)
    assert own_error < 0.5 or compared.p_regression is None, "growth is certain, among however many suites"


RunOf = Callable[..., RunFolder]


@pytest.fixture
def run_of(runs: ModuleType) -> RunOf:
    """A function that writes a run in which these roles answered every question right."""

    def write(plan: Plan, path: Path, roles: tuple[Role, ...] = ROLES, **more: object) -> RunFolder:
        folder: RunFolder = runs.started(plan, path, roles, engine="e", claimed_phases=("extend",), **more)
        for role in roles:
            for item in plan.of("accuracy"):
                folder.append(runs.answer_of(role, item))
        return folder

    return write


@pytest.fixture
def plan(tmp_path: Path) -> Plan:
    return prepare(
        RunSpec.of(
            reference="torch_native", candidate="sage_attn", questions=8, suites=("accuracy",),
            baselines=str(tmp_path / "baselines"),
        )
    )  # fmt: skip


def accept_both(plan: Plan, folder: RunFolder) -> Plan:
    """Store what both roles answered, and plan the run whose reference is stored."""
    root = Path(plan.spec.policy.baselines)
    of = {}
    for role in ROLES:
        answers = [answer for answer in folder.answers() if answer.role == role]
        of[role] = write_baseline(root, _make(folder, role, "pass"), answers)
    stored = Side(backend=str(of["reference"]))
    return prepare(with_stored_reference(plan.spec.model_copy(update={"reference": stored})))


def test_an_accepted_reference_makes_its_server_unnecessary(plan: Plan, tmp_path: Path, run_of: RunOf) -> None:
    first = run_of(plan, tmp_path / "first")
    plan = accept_both(plan, first)
    assert plan.spec.reference == Side(backend="torch_native")
    second = open_folder(plan, tmp_path / "second")
    assert asked_roles(plan, second) == ROLES, "before it is compared with baselines"
    for _ in range(2):  # resuming a run changes nothing
        status = attach_baselines(second, gate=True)
        assert status is not None
        assert set(status.used) == set(ROLES)
        assert [answer.role for answer in second.answers()] == ["reference"] * 8
        assert [server.role for server in second.progress().servers] == ["reference"]
    assert asked_roles(plan, second) == ("candidate",)
    assert envelope_seed(second) == first.nonce != second.nonce, "it answers what the stored reference answered"
    assert status_of(second) == status


def test_a_reference_that_was_accepted_under_other_conditions_is_refused(plan: Plan, tmp_path: Path, run_of: RunOf) -> None:
    stored = accept_both(plan, run_of(plan, tmp_path / "first"))
    other = prepare(stored.spec.changed(questions=9))
    with pytest.raises(UsageError, match="accepted under other conditions: items hash"):
        open_folder(other, tmp_path / "second")
    assert not (tmp_path / "second").exists()


def test_the_folder_of_the_same_model_may_have_moved_since_it_was_accepted(plan: Plan, tmp_path: Path, run_of: RunOf) -> None:
    before = {"model_path": "/old", "tokenizer_path": "/old", "dtype": "float32"}
    now = {"model_path": "/new", "tokenizer_path": "/new", "dtype": "bfloat16"}
    stored = accept_both(plan, run_of(plan, tmp_path / "first", arguments=before))
    second = open_folder(stored, tmp_path / "second")
    attach_baselines(second, gate=False)
    run_of(stored, tmp_path / "second", roles=("candidate",), arguments=now)
    assert set(build(second).environment.argument_differences) == {"dtype"}


def test_a_run_with_a_stored_reference_is_no_gate(plan: Plan, tmp_path: Path, run_of: RunOf) -> None:
    stored = accept_both(plan, run_of(plan, tmp_path / "first"))
    second = open_folder(stored, tmp_path / "second")
    attach_baselines(second, gate=False)
    run_of(stored, tmp_path / "second", roles=("candidate",))
    report = build(second)
    assert not [check for check in report.checks if check.id == "candidate-baseline" or check.requirement == "required"]
    assert [check.outcome.id for check in report.checks if check.id == "reference-baseline"] == ["reference-stored"]
    assert "baseline" not in {suite.id for suite in report.suites}
    third = open_folder(plan, tmp_path / "third")
    assert attach_baselines(third, gate=False) is None, "nothing to attach"


def test_a_stored_file_that_was_changed_is_refused(plan: Plan, tmp_path: Path, run_of: RunOf) -> None:
    stored = accept_both(plan, run_of(plan, tmp_path / "first"))
    with (Path(stored.spec.reference_baseline) / "answers.jsonl").open("a") as file:
        file.write("{}\n")
    with pytest.raises(EvidenceError, match="changed after it was accepted"):
        attach_baselines(open_folder(stored, tmp_path / "second"), gate=False)


def test_another_engine_or_package_of_a_side_is_another_key(plan: Plan, tmp_path: Path, run_of: RunOf) -> None:
    manifest = run_of(plan, tmp_path / "first").manifest()
    before = _key_of(manifest, "candidate")
    # An older engine in another environment, while assay's own stays.
    engine = _key_of(manifest.model_copy(update={"engines": {"candidate": "0.5.22"}}), "candidate")
    assert [name for name, *_ in engine.differing(before)] == ["engine"]
    assert engine.engine == "SGLang 0.5.22 on cpu"
    spec = {**manifest.spec, "candidate": {**manifest.spec["candidate"], "packages": ["transformers==5.3"]}}
    packages = _key_of(manifest.model_copy(update={"spec": spec}), "candidate")
    assert packages.differing(before) == [("packages", "", "transformers==5.3")]
    assert packages.name != before.name


def test_a_baseline_from_before_a_field_was_added_keeps_its_name() -> None:
    before = "mine-" + hashlib.sha256(key().model_dump_json(exclude={"interpreter", "packages"}).encode()).hexdigest()[:8]
    assert key().name == before


def test_only_a_run_with_a_verdict_can_be_accepted(plan: Plan, tmp_path: Path, run_of: RunOf) -> None:
    with pytest.raises(UsageError, match="inconclusive"):
        _make(run_of(plan, tmp_path / "first"), "candidate", "inconclusive")
    with pytest.raises(UsageError, match="no answers from a candidate server"):
        _make(open_folder(plan, tmp_path / "second"), "candidate", "pass")


def test_worse_numbers_are_accepted_only_for_a_reason(plan: Plan, tmp_path: Path, run_of: RunOf) -> None:
    run, root = run_of(plan, tmp_path / "run"), tmp_path / "baselines"
    first = propose(run, "pass", root)
    assert [(one.role, one.before) for one in first] == [("reference", None), ("candidate", None)]
    assert sorted(path.name for path in accept(run, first, root)) == sorted(read_all(root)[0])
    (of,) = [one.now for one in first if one.role == "candidate"]
    write_baseline(root, of.model_copy(update={"own_errors": {"layer-0": 0.01}}), [])
    with pytest.raises(UsageError, match="--widen"):
        accept(run, propose(run, "regression", root), root)
    accept(run, propose(run, "regression", root, "no layer diff any more"), root)
    accepted = read_all(root)[0][of.key.name]
    assert (accepted.own_errors, accepted.reason) == ({}, "no layer diff any more")
    assert len(read_answers(root / of.key.name)) == 8


@pytest.fixture
def accepted_then_asked(plan: Plan, tmp_path: Path, run_of: RunOf, runs: ModuleType) -> RunOf:
    """Writes a run whose reference is stored and whose candidate computed the first layers of four."""

    def tell(folder: RunFolder, role: Role, torch: str) -> None:
        made = Fingerprint(source="server", engine="e", model="tiny", packages={"torch": torch})
        FINGERPRINT.write(folder.server_folder(role), made, folder.nonce)

    def write(layers: int = 4, torch: dict[Role, str] | None = None) -> RunFolder:
        first = run_of(plan, tmp_path / "first")
        for role, told in (torch or {}).items():
            tell(first, role, told)
        runs.count_layers(first, "reference", "torch_native")
        stored = accept_both(plan, first)
        second = open_folder(stored, tmp_path / "second", "gate")
        attach_baselines(second, gate=True)
        run_of(stored, tmp_path / "second", roles=("candidate",))
        runs.count_layers(second, "candidate", "sage_attn", layers)
        if torch:
            tell(second, "candidate", "2")
        return second

    return write


@pytest.mark.parametrize(
    ("torch", "same", "baseline"),
    [
        ({"reference": "2", "candidate": "2"}, "ok", "ok"),
        ({"reference": "1", "candidate": "2"}, "failed", "ok"),
        ({"reference": "2", "candidate": "1"}, "ok", "missing"),
        ({"candidate": "2"}, "ok", "ok"),
        (None, "ok", "ok"),
    ],
)
def test_what_the_servers_of_baselines_served_is_compared(
    accepted_then_asked: Callable[..., RunFolder], torch: dict[Role, str] | None, same: str, baseline: str
) -> None:
    by_id = {check.id: check for check in build(accepted_then_asked(torch=torch)).checks}
    assert (by_id["same-servers"].status, by_id["candidate-baseline"].status) == (same, baseline)
    if same == "failed":
        assert by_id["same-servers"].outcome == state("served-otherwise", said=["torch is 1 in A, 2 in B"])
    if baseline == "missing":
        assert by_id["candidate-baseline"].outcome.values["served"] == ["torch is 1 in A, 2 in B"]


def test_a_report_says_that_its_reference_is_stored(accepted_then_asked: RunOf) -> None:
    second = accepted_then_asked()
    report = build(second)
    assert re.fullmatch(r"e, stored: baseline torch_native-\w{8}, accepted 20\S+Z", report.reference.engine)
    assert [(call.kernel, call.layers) for call in report.reference.calls] == [("torch_native", 4)]
    by_id = {check.id: check for check in report.checks}
    assert by_id["reference-baseline"].outcome.id == "reference-stored"
    assert by_id["same-servers"].outcome.values["stored"] is True
    assert report.reproduce.startswith("assay gate ")
    assert re.search(r"--reference=\S+/torch_native-\w{8}", report.reproduce)
    with pytest.raises(UsageError, match="no answers from a reference server"):
        _make(second, "reference", "pass")


def test_a_nonfinite_output_of_its_own_server_is_the_candidates() -> None:
    served, shadow = torch.ones(2, 1, 8), torch.ones(2, 1, 8)
    served[1] = float("nan")
    sums = LayerSums(heads=1, device=torch.device("cpu"))
    sums.measure(shadow, served, torch.from_numpy(condition_numbers("extend", [1, 1], [0, 16])))
    header = ShadowHeader(reference="mine", candidate="torch_native", phases=("extend", "decode"))
    seen = with_roles_exchanged(ShadowErrors(sums.cells(layer=0, first_head=0), (header,)), ("extend",))
    errors = _own_errors_by_condition(seen)
    assert errors["layer-0-extend-cached-prefix-0"] == 0
    assert errors["layer-0-extend-cached-prefix-at-least-16"] == float("inf")
    assert (seen.headers[0].reference, seen.headers[0].candidate) == ("torch_native", "mine")
    assert _own_errors_by_condition(with_roles_exchanged(ShadowErrors(sums.cells(0, 0), (header,)), ("decode",))) == {}


@pytest.mark.parametrize("damage", ["changed", "cut", "gone"])
def test_answers_that_are_not_those_accepted_are_refused(plan: Plan, tmp_path: Path, run_of: RunOf, damage: str) -> None:
    run, root = run_of(plan, tmp_path / "run"), tmp_path / "baselines"
    place, _ = accept(run, propose(run, "pass", root), root)
    path = place / "answers.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    assert len(read_answers(place)) == 8
    if damage == "gone":
        path.unlink()
    else:
        path.write_text("".join(lines[:-1]) if damage == "cut" else "".join(lines).replace('"A"', '"B"'))
    with pytest.raises(EvidenceError, match="was changed after it was accepted"):
        read_answers(place)
    with pytest.raises(EvidenceError, match="was changed after it was accepted"):
        attach_baselines(open_folder(plan, tmp_path / "second"), gate=True)
