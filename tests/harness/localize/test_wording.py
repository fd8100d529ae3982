from __future__ import annotations

import pytest

from assay.harness.attention.bugs.bug import Bug
from assay.harness.attention.bugs.family import BY_ID, FAMILY
from assay.harness.localize import wording


@pytest.mark.parametrize("bug", FAMILY, ids=[bug.id for bug in FAMILY])
def test_every_bug_has_a_verb_phrase(bug: Bug) -> None:
    said = wording.does(bug, "")
    assert said
    assert not said.startswith("computes "), "an id without a phrase of its own"
    assert "\\" not in said


def test_no_two_bugs_do_the_same() -> None:
    said = [wording.does(bug, "") for bug in FAMILY]
    assert sorted(said) == sorted(set(said))


@pytest.mark.parametrize(
    ("id_", "condition", "said"),
    [
        ("mask-top-left", "cached prefix > 0", "applies a top-left causal mask once a prefix is cached"),
        ("leak-keys-values-next", "", "reads the keys and values of the next request"),
        ("last-block-lost-64", "length % 64 != 0", "loses the last partial block of 64 keys where length % 64 != 0"),
        (None, "batch > 1", "computes something other than attention where batch > 1"),
    ],
)
def test_what_a_kernel_does_and_when(id_: str | None, condition: str, said: str) -> None:
    assert wording.does(BY_ID[id_] if id_ else None, condition) == said


def test_a_place_names_phases_condition_and_extent() -> None:
    spans = ["all 4 layers", "head 1 of 4"]
    assert wording.place(["extend"], "cached prefix > 0", False, spans) == (
        "in extend with a cached prefix (all 4 layers, head 1 of 4)"
    )
    assert wording.place(["extend", "decode"], "", False, spans).startswith("in extend and decode (")
    assert wording.place(["decode"], "decode only", False, spans).startswith("in decode (")
    assert wording.place(["extend"], "batch > 1", True, spans).startswith("in extend only where batch > 1 (")
