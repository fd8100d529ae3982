"""The control's file, as the harness writes it and a server reads it."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from assay.harness.engines.inside.attachment import ControlReader
from assay.harness.engines.inside.control import Control, set_control
from assay.harness.errors import EvidenceError


def test_a_control_is_read_as_it_was_set(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "server"
    assert ControlReader(folder).latest().control == Control()
    control = Control(shadow=True, substitute=(3, 1, 3), trace="probe-1.a")
    set_control(folder, control)
    assert ControlReader(folder).latest().control == control
    assert control.substitute == (1, 3)
    assert [file.name for file in folder.iterdir()] == ["control.json"]


@pytest.mark.parametrize("fields", [{"trace": "../x"}, {"trace": ".."}, {"trace": "a b"}, {"substitute": (-1,)}])
def test_invalid_labels_and_layers_are_refused(fields: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        Control.model_validate(fields)


def test_a_reader_reads_the_file_only_after_a_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reader = ControlReader(tmp_path)
    assert reader.latest().control == Control()
    tokens = set()
    for layers in ((1,), (2,), (2,), ()):
        set_control(tmp_path, Control(substitute=layers))
        setting = reader.latest()
        assert setting.control.substitute == layers
        tokens.add(setting.token)
    assert len(tokens) == 4  # the same control set again is another setting
    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_text", lambda self: pytest.fail("read again"))
        assert reader.latest() == setting
    (tmp_path / "control.json").unlink()
    assert reader.latest().control == Control()


def test_a_damaged_control_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "control.json").write_text('{"token": "a", "control": {"watsh": true}}')
    with pytest.raises(EvidenceError, match=r"control\.json is damaged"):
        ControlReader(tmp_path).latest()


def test_a_session_lasts_until_the_shadow_is_switched_off(tmp_path: Path) -> None:
    names = []
    for control in (Control(shadow=True), Control(shadow=True, trace="a"), Control(trace="a"), Control(shadow=True)):
        set_control(tmp_path, control)
        names.append(ControlReader(tmp_path).latest().session)
    first, same, off, second = names
    assert (first == same, off, second not in ("", first)) == (True, "", True)
    assert first


@pytest.mark.parametrize(
    ("control", "observes"),
    [
        (Control(), False), (Control(profile="kernels"), False), (Control(shadow=True), True),
        (Control(substitute=(0,)), True), (Control(trace="a"), True), (Control(fault="mask-top-left"), True),
    ],
)  # fmt: skip
def test_only_what_needs_the_calls_observes_them(control: Control, observes: bool) -> None:
    # An observed pass runs without CUDA graphs: a profile must list what runs otherwise.
    assert control.observes is observes
