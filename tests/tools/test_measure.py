"""Sizes and vocabulary of a tree: each number counts what its title says."""

from __future__ import annotations

import ast
import importlib
import subprocess
from pathlib import Path
from types import ModuleType

import pytest

A = '''"""A module."""

from dataclasses import dataclass
from pydantic import BaseModel

LIMIT = 3  # of something
_HIDDEN = 4


@dataclass(frozen=True)
class Point:
    """What a point is."""

    x: int

    def moved(self, by: int) -> int:
        """How far it moved."""
        return self.x + by if by else 0

    def _own(self) -> None: ...


class Record(BaseModel):
    x: int


class Derived(Record):
    pass


class Plain:
    def told(self) -> str:
        return "mend the module; somebody else's; Mended, amended"


# A comment.
def many(a, b, c, d, e, f, g, h, i):
    """Return nothing."""


def _private(x):
    for one in x:
        if one and x or one:
            continue
'''
B = 'class Plain:\n    """Dear reader: a docstring is no message."""\n'
FILES = {"harness/a/x.py": A, "harness/b/x.py": B, "docs/page.md": "It is told in vain.\n", "tests/test_a.py": "x = 1\n"}


@pytest.fixture(scope="module")
def measure() -> ModuleType:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend("tools")
        return importlib.import_module("measure")


@pytest.fixture(scope="module")
def counts(measure: ModuleType) -> dict[str, float]:
    made: dict[str, float] = measure.measure(FILES).counts
    return made


@pytest.mark.parametrize(
    "text",
    [
        "one = 1", "for one in x: ...", "[one for one in x]", "(found := 1)", "def f(one): ...", "def f(found: int): ...",
        "lambda one: 1", "def found(): ...", "import found", "from a import b as one", "with a as one: ...",
        "class A:\n    one: str", "found: str = ''", "try: ...\nexcept E as found: ...", "match a:\n    case [*one]: ...",
    ],
)  # fmt: skip
def test_a_binding_is_seen_wherever_it_is(measure: ModuleType, text: str) -> None:
    assert len(list(measure.bindings_of(ast.parse(text)))) == 1


def test_the_lint_fails_on_words_names_and_docstrings_and_where_there_is_nothing(
    measure: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    subprocess.run(["git", "init", "--quiet", str(tmp_path)], check=True)  # a working tree is what git does not ignore
    lint = ["--lint", "--tree", str(tmp_path)]
    assert measure.main(lint) == 1
    assert "no module of the product" in capsys.readouterr().out
    for path, text in FILES.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    assert measure.main(lint) == 1
    assert capsys.readouterr().out.splitlines() == [
        "names that say nothing: harness/a/x.py:42: one",
        "words out: mend, messages: 2 harness/a/x.py",
        "words out: in vain, docs: 1 docs/page.md",
        "words out: somebody else's, messages: 1 harness/a/x.py",
        "words out: told, docs: 1 docs/page.md",
        "docstrings of functions that begin with What, Whether, How, Which: harness/a/x.py: Point.moved",
    ]
    (tmp_path / "harness/a/x.py").write_text("def f():\n    return 1\n")
    (tmp_path / "docs/page.md").write_text("It says so.\n")
    assert measure.main(lint) == 0
