"""docs/screens.md shows each picture that docs/screens.py takes, and no other."""

from __future__ import annotations

import re
from pathlib import Path

DOCS = Path(__file__).parents[1] / "docs"
SIZES = {"1280", "1024", "390", "dark"}


def test_every_page_is_shown_on_every_screen() -> None:
    shown = re.findall(r"\(screens/(\w+)-(\w+)\.webp\)", (DOCS / "screens.md").read_text(encoding="utf-8"))
    pages = {page for page, _ in shown}
    assert pages == {"run", "failed", "compare", "check"}
    assert sorted(shown) == sorted((page, size) for page in pages for size in SIZES)
    files = {path.name for path in (DOCS / "screens").iterdir()}
    assert files == {f"{page}-{size}.webp" for page, size in shown}
