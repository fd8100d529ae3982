"""Messages, docs and docstrings keep to plain technical English, as far as a list of words and a first word can show it."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any

import pytest


@pytest.fixture(scope="module")
def measure() -> ModuleType:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend("tools")
        return importlib.import_module("measure")


@pytest.fixture(scope="module")
def where(measure: ModuleType) -> dict[str, list[str]]:
    """Return the places that the counts of the working tree come from, by the titles of the counts."""
    files: Any = measure.tree_at(measure.ROOT)
    assert len(files) > 500, "the working tree was read"
    places: dict[str, list[str]] = measure.prose(files).where
    return places


@pytest.mark.parametrize("kind", ["messages", "docs"])
def test_no_word_of_the_list_is_used(measure: ModuleType, where: dict[str, list[str]], kind: str) -> None:
    titles = {word: f"words out: {word}, {kind}" for word in measure.WORDS}
    found = {word: where[title] for word, title in titles.items() if where[title]}
    assert not found, f"other words are wanted in {kind}; `python tools/measure.py --files` lists the places"


def test_docstrings_of_functions_begin_with_a_verb(where: dict[str, list[str]]) -> None:
    weak = where["docstrings of functions that begin with What, Whether, How, Which"]
    assert not weak, 'write "Return True if ...", "Describe ...", "Count ..."'
