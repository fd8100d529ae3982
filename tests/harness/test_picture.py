from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
from pydantic import ValidationError

from assay.harness.picture import MAX_KEYS, MAX_QUERIES, Picture
from assay.harness.verdict import Finding

FINDING = {
    "id": "k", "title": "k", "severity": "serious", "where": "extend", "diagnosis": "d", "evidence": [], "reproduce": "",
}  # fmt: skip


def test_a_finding_keeps_its_picture_on_disk(examples: ModuleType) -> None:
    drawn = examples.picture(examples.EVERY_KIND)
    found = Finding.model_validate({**FINDING, "operator": "query i sees all keys", "picture": drawn})
    assert Finding.model_validate_json(found.model_dump_json()) == found


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"query_positions": (0,)}, "4 queries and 6 keys"),
        ({"key_indices": (0,)}, "4 queries and 6 keys"),
        ({"cells": ("#oo.", "##oo..", "###oo.", "####oo")}, "6 expected weights, 6 weights and cells"),
        ({"cells": ("#oo..?", "##oo..", "###oo.", "####oo")}, "6 expected weights, 6 weights and cells"),
        ({"rows": ("nan", "read", "read", "read")}, "a query that is nan has 6 expected weights, 0 weights"),
        ({"rows": ("lost", "read", "read", "read")}, "rows.0"),
    ],
)
def test_a_picture_that_does_not_fit_together_is_refused(examples: ModuleType, wrong: dict[str, Any], says: str) -> None:
    with pytest.raises(ValidationError, match=says):
        examples.picture(examples.TOP_LEFT, **wrong)


@pytest.mark.parametrize(("queries", "keys"), [(MAX_QUERIES + 1, 2), (2, MAX_KEYS + 1)])
def test_a_picture_that_is_too_large_is_refused(examples: ModuleType, queries: int, keys: int) -> None:
    assert isinstance(examples.picture(("#" * min(keys, MAX_KEYS),) * min(queries, MAX_QUERIES)), Picture)
    with pytest.raises(ValidationError, match="should have at most"):
        examples.picture(("#" * keys,) * queries)


def test_breaks_are_where_a_sequence_ends_or_something_is_left_out(examples: ModuleType) -> None:
    drawn = examples.picture(
        ("##....",) * 4, query_sequences=(0, 0, 0, 1), query_positions=(2, 3, 9, 10), key_sequences=(0, 0, 0, 0, 1, 1),
        key_indices=(0, 1, 7, 8, 9, 10),
    )  # fmt: skip
    assert drawn.query_breaks == (2, 3)
    assert drawn.key_breaks == (2, 4)
