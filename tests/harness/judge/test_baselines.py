"""Baselines: a stored reference answers for its server, under the same conditions, with the accepted files."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from assay.harness.config import RunSpec
from assay.harness.errors import EvidenceError, UsageError
from assay.harness.evidence.baseline import Baseline, Key, read_answers, read_baseline, write_baseline
from assay.harness.evidence.fingerprint import FINGERPRINT, Fingerprint
from assay.harness.evidence.folder import RunFolder
from assay.harness.evidence.manifest import ServerManifest
from assay.harness.judge.baselines import _key_of, _make, accept, adopt_reference, envelope_seed, with_stored_reference
from assay.harness.judge.build import build
from assay.harness.run.plan import Plan, prepare
from assay.harness.run.run_folder import asked_roles, open_folder
from assay.harness.sides import ROLES, Role, Side
from assay.harness.statement import state


def key(backend: str = "mine", engine: str = "SGLang 1 on cpu") -> Key:
    return Key(
        engine=engine, backend=backend, model_hash="m" * 64, hardware="a machine", flags=("--page-size=16",), items_hash="i"
    )  # fmt: skip


def baseline(of: Key, run_id: str = "r") -> Baseline:
    server = ServerManifest(role="reference", backend=of.backend, engine=of.engine, claimed_phases=("extend",))
    return Baseline(key=of, side=Side(backend=of.backend), accepted="2026-01-01T00:00:00Z", run_id=run_id, git="", server=server)


@pytest.mark.parametrize("field", ["engine", "model_hash", "hardware", "items_hash", "interpreter"])
def test_each_part_of_the_key_makes_another_baseline(field: str) -> None:
    other = key().model_copy(update={field: "x"})
    assert [name for name, _, _ in key().differing(other)] == [field]
    assert key().name != other.name


@pytest.mark.parametrize("fails_at", [1, 2])
def test_a_baseline_stays_if_writing_its_successor_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails_at: int) -> None:
    write_baseline(tmp_path, baseline(key(), "first"), [])
    calls = 0

    def replace_until_full(old: Path, new: Path) -> None:
        nonlocal calls
        calls += 1
        if calls >= fails_at:
            raise OSError(28, "No space left on device")
        Path(old).rename(new)

    monkeypatch.setattr(os, "replace", replace_until_full)
    with pytest.raises(EvidenceError, match="No space left"):
        write_baseline(tmp_path, baseline(key(), "second"), [])
    assert read_baseline(tmp_path / key().name).run_id == "first"


def test_a_baseline_is_read_as_it_was_written_and_replaces_the_old_one(tmp_path: Path) -> None:
    write_baseline(tmp_path, baseline(key(), "first"), [])
    write_baseline(tmp_path, baseline(key(), "second"), [])
    assert [path.name for path in tmp_path.iterdir()] == [key().name]
    assert read_baseline(tmp_path / key().name) == baseline(key(), "second").model_copy(
        update={"files": read_baseline(tmp_path / key().name).files}
    )


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
    return prepare(RunSpec.of(reference="torch_native", candidate="sage_attn", questions=8, suites=("accuracy",)))


def stored(plan: Plan, folder: RunFolder) -> Plan:
    """Accept the reference of a run, and plan the run in which it is stored."""
    place = accept(folder, "pass", folder.path.parent / "baselines")
    return prepare(with_stored_reference(plan.spec.model_copy(update={"reference": Side(backend=str(place))})))


def test_an_accepted_reference_makes_its_server_unnecessary(plan: Plan, tmp_path: Path, run_of: RunOf) -> None:
    first = run_of(plan, tmp_path / "first")
    assert asked_roles(plan, first) == ROLES
    assert adopt_reference(first) is False, "nothing to adopt"
    plan = stored(plan, first)
    assert plan.spec.reference == Side(backend="torch_native")
    second = open_folder(plan, tmp_path / "second")
    for _ in range(2):  # resuming a run changes nothing
        assert adopt_reference(second) is True
        assert [answer.role for answer in second.answers()] == ["reference"] * 8
        assert [server.role for server in second.progress().servers] == ["reference"]
    assert asked_roles(plan, second) == ("candidate",)
    assert envelope_seed(second) == first.nonce != second.nonce, "it answers what the stored reference answered"


def test_a_reference_that_was_accepted_under_other_conditions_is_refused(plan: Plan, tmp_path: Path, run_of: RunOf) -> None:
    accepted = stored(plan, run_of(plan, tmp_path / "first"))
    other = prepare(accepted.spec.changed(questions=9))
    with pytest.raises(UsageError, match="accepted under other conditions: items hash"):
        open_folder(other, tmp_path / "second")
    assert not (tmp_path / "second").exists()


def test_the_folder_of_the_same_model_may_have_moved_since_it_was_accepted(plan: Plan, tmp_path: Path, run_of: RunOf) -> None:
    before = {"model_path": "/old", "tokenizer_path": "/old", "dtype": "float32"}
    now = {"model_path": "/new", "tokenizer_path": "/new", "dtype": "bfloat16"}
    accepted = stored(plan, run_of(plan, tmp_path / "first", arguments=before))
    second = open_folder(accepted, tmp_path / "second")
    adopt_reference(second)
    run_of(accepted, tmp_path / "second", roles=("candidate",), arguments=now)
    assert set(build(second).environment.argument_differences) == {"dtype"}


def test_another_engine_or_package_of_a_side_is_another_key(plan: Plan, tmp_path: Path, run_of: RunOf) -> None:
    manifest = run_of(plan, tmp_path / "first").manifest()
    before = _key_of(manifest)
    # An older engine in another environment, while assay's own stays.
    engine = _key_of(manifest.model_copy(update={"engines": {"reference": "0.5.22"}}))
    assert [name for name, *_ in engine.differing(before)] == ["engine"]
    assert engine.engine == "SGLang 0.5.22 on cpu"
    spec = {**manifest.spec, "reference": {**manifest.spec["reference"], "packages": ["transformers==5.3"]}}
    packages = _key_of(manifest.model_copy(update={"spec": spec}))
    assert packages.differing(before) == [("packages", "", "transformers==5.3")]
    assert packages.name != before.name


def test_only_a_run_with_a_verdict_can_be_accepted(plan: Plan, tmp_path: Path, run_of: RunOf) -> None:
    with pytest.raises(UsageError, match="inconclusive"):
        _make(run_of(plan, tmp_path / "first"), "inconclusive")
    with pytest.raises(UsageError, match="no answers from a reference server"):
        _make(open_folder(plan, tmp_path / "second"), "pass")


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
        accepted = stored(plan, first)
        second = open_folder(accepted, tmp_path / "second", "gate")
        adopt_reference(second)
        run_of(accepted, tmp_path / "second", roles=("candidate",))
        runs.count_layers(second, "candidate", "sage_attn", layers)
        if torch:
            tell(second, "candidate", "2")
        return second

    return write


@pytest.mark.parametrize(("torch", "same"), [({"reference": "2"}, "ok"), ({"reference": "1"}, "failed"), (None, "ok")])
def test_what_the_stored_reference_served_is_compared(
    accepted_then_asked: Callable[..., RunFolder], torch: dict[Role, str] | None, same: str
) -> None:
    (check,) = [check for check in build(accepted_then_asked(torch=torch)).checks if check.id == "same-servers"]
    assert check.status == same
    if same == "failed":
        assert check.outcome == state("served-otherwise", said=["torch is 1 in A, 2 in B"])


def test_a_report_says_that_its_reference_is_stored(accepted_then_asked: RunOf) -> None:
    second = accepted_then_asked()
    report = build(second)
    assert re.fullmatch(r"e, stored: baseline torch_native-\w{8}, accepted 20\S+Z", report.reference.engine)
    assert [(call.kernel, call.layers) for call in report.reference.calls] == [("torch_native", 4)]
    by_id = {check.id: check for check in report.checks}
    assert by_id["same-servers"].outcome.values["stored"] is True
    assert report.reproduce.startswith("assay gate ")
    assert re.search(r"--reference=\S+/torch_native-\w{8}", report.reproduce)
    with pytest.raises(UsageError, match="no answers from a reference server"):
        _make(second, "pass")


@pytest.mark.parametrize("damage", ["changed", "cut", "gone"])
def test_answers_that_are_not_those_accepted_are_refused(plan: Plan, tmp_path: Path, run_of: RunOf, damage: str) -> None:
    accepted = stored(plan, run_of(plan, tmp_path / "run"))
    place = Path(accepted.spec.reference_baseline)
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
        adopt_reference(open_folder(accepted, tmp_path / "second"))
