from __future__ import annotations

from pathlib import Path

import pytest

from assay.harness.attention.source import source_hashes


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package with a kernel that imports some of it, in a folder on the path."""
    files = {
        "mykernels/__init__.py": "",
        "mykernels/fast.py": "import math\nimport numpy\nfrom . import tiles\n\n\ndef forward(call):\n    import beside\n",
        "mykernels/tiles.py": "from mykernels.deep import sizes\n",
        "mykernels/deep/__init__.py": "",
        "mykernels/deep/sizes.py": "SIZE = 1\n",
        "mykernels/unused.py": "",
        "mykernels/fast.cu": "__global__ void fast() {}\n",
        "beside.py": "import mykernels.no_such_module\n",
        "unrelated.py": "",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


NAME = "mykernels.fast:forward"


def test_a_kernel_is_what_it_imports(package: Path) -> None:
    assert list(source_hashes(NAME)) == [
        "file fast.cu", "module beside", "module mykernels", "module mykernels.deep", "module mykernels.deep.sizes",
        "module mykernels.fast", "module mykernels.tiles", "package numpy",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("file", "part"),
    [
        ("mykernels/fast.py", "module mykernels.fast"), ("mykernels/deep/sizes.py", "module mykernels.deep.sizes"),
        ("mykernels/fast.cu", "file fast.cu"), ("beside.py", "module beside"),
    ],
)  # fmt: skip
def test_each_of_its_files_changes_it(package: Path, file: str, part: str) -> None:
    before = source_hashes(NAME)
    with (package / file).open("a") as text:
        text.write("# changed\n" if file.endswith(".py") else "// changed\n")
    after = source_hashes(NAME)
    assert {name for name in before if before[name] != after[name]} == {part}


def test_what_it_does_not_import_does_not_change_it(package: Path) -> None:
    before = source_hashes(NAME)
    for name in ("mykernels/unused.py", "unrelated.py"):
        (package / name).write_text("changed = 1\n")
    assert source_hashes(NAME) == before


def test_a_kernel_of_assay_is_its_folder_and_its_package() -> None:
    parts = source_hashes("sage_attn")
    assert {"module assay.harness.attention.sage", "package sageattention", "package torch"} <= set(parts)
    assert not any(part.startswith(("module assay.harness.judge", "module assay.reports")) for part in parts)
