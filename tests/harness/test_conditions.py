from __future__ import annotations

import pytest

from assay.harness.conditions import (
    BATCH_SIZE,
    CACHED_PREFIX,
    CACHED_PREFIX_TOKENS,
    POSITION,
    PROMPT_LENGTH,
    SEQUENCE_LENGTH,
    Buckets,
    condition_id,
)


def test_the_last_prefix_bucket_is_the_cached_prefix() -> None:
    assert CACHED_PREFIX.labels == ("0", "1", "2-15", ">= 16")
    assert CACHED_PREFIX.label(CACHED_PREFIX_TOKENS) == ">= 16"
    assert CACHED_PREFIX.label(CACHED_PREFIX_TOKENS - 1) == "2-15"


@pytest.mark.parametrize(
    ("buckets", "value", "label"),
    [
        (CACHED_PREFIX, 0, "0"), (CACHED_PREFIX, 1, "1"), (CACHED_PREFIX, 2, "2-15"), (CACHED_PREFIX, 54, ">= 16"),
        (POSITION, 15, "1-15"), (POSITION, 256, ">= 256"),
        (PROMPT_LENGTH, 1, "1-64"), (PROMPT_LENGTH, 64, "1-64"), (PROMPT_LENGTH, 65, "65-128"),
        (PROMPT_LENGTH, 128, "65-128"), (PROMPT_LENGTH, 129, "129-256"), (PROMPT_LENGTH, 2048, "1025-2048"),
        (BATCH_SIZE, 1, "1"), (BATCH_SIZE, 4, "2-4"), (BATCH_SIZE, 5, "5-8"), (BATCH_SIZE, 16, "9-16"),
        (BATCH_SIZE, 17, ">= 17"), (SEQUENCE_LENGTH, 63, "1-63"), (SEQUENCE_LENGTH, 4096, ">= 4096"),
    ],
)  # fmt: skip
def test_labels(buckets: Buckets, value: int, label: str) -> None:
    assert buckets.label(value) == label


def test_ids_are_kebab_case() -> None:
    assert condition_id(CACHED_PREFIX.id, ">= 16") == "cached-prefix-at-least-16"
    assert condition_id(BATCH_SIZE.id, "not observed") == "batch-size-not-observed"
