"""Counts of compared calls: what processes write, and how their files are joined."""

from __future__ import annotations

from pathlib import Path

import pytest

from assay.harness.errors import EvidenceError
from assay.harness.evidence.envelope import ENVELOPE_FILES, EngineLimits, EnvelopeCounts, read_envelope

LIMITS = EngineLimits(context_tokens=4096)


def counts(layers: dict[int, int], run: str = "n") -> EnvelopeCounts:
    return EnvelopeCounts(
        run=run,
        limits=LIMITS,
        calls={"extend": {"batch": {"1": layers}}},
        met={"extend": {"batch": dict.fromkeys(layers, ((1, 1),))}},
    )


def test_processes_that_share_heads_count_what_all_of_them_saw(tmp_path: Path) -> None:
    ENVELOPE_FILES.write(tmp_path, counts({0: 5, 1: 5}), process="1")
    ENVELOPE_FILES.write(tmp_path, counts({0: 5, 1: 4}), process="2")
    found = read_envelope(tmp_path, "n")
    assert found is not None
    assert found.calls["extend"]["batch"]["1"] == {0: 5, 1: 4}
    assert found.count("extend", "batch", "1") == 4


def test_processes_with_other_layers_are_joined(tmp_path: Path) -> None:
    ENVELOPE_FILES.write(tmp_path, counts({0: 5}), process="1")
    ENVELOPE_FILES.write(tmp_path, counts({1: 3}), process="2")
    found = read_envelope(tmp_path)
    assert found is not None
    assert found.layers("extend") == [0, 1]
    assert found.count("extend", "batch", "1") == 3


def test_lengths_are_those_that_every_layer_and_every_process_met(tmp_path: Path) -> None:
    shared = counts({0: 2, 1: 2}).model_copy(update={"met": {"extend": {"batch": {0: ((1, 9),), 1: ((1, 3), (7, 9))}}}})
    other = shared.model_copy(update={"met": {"extend": {"batch": {0: ((1, 8),), 1: ((1, 8),)}}}})
    for number, one in enumerate((shared, other)):
        ENVELOPE_FILES.write(tmp_path, one, process=str(number))
    found = read_envelope(tmp_path)
    assert found is not None
    assert found.met["extend"]["batch"] == {0: ((1, 8),), 1: ((1, 3), (7, 8))}
    assert found.values("extend", "batch") == ((1, 3), (7, 8))
    assert found.reached("extend", "batch") == 8


def test_counts_of_another_run_are_refused(tmp_path: Path) -> None:
    ENVELOPE_FILES.write(tmp_path, counts({0: 5}, run="other"), process="1")
    with pytest.raises(EvidenceError, match="belongs to run other"):
        read_envelope(tmp_path, "n")
