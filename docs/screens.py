"""Takes the pictures of ``docs/screens.md``: each page on a wide screen, a laptop, a phone, and in the dark.

``python docs/screens.py run=runs/ID/report.html failed=… compare=… check=…`` (needs Chromium and selenium)
"""

from __future__ import annotations

import argparse
import base64
from pathlib import Path
from typing import NamedTuple

from screenshot import browser, open_page, resize

FOLDER = Path(__file__).parent / "screens"
QUALITY = 60
"""Of a WebP: text stays sharp at 30 to 90 kB a picture."""


class Screen(NamedTuple):
    """A screen: its name, the CSS pixels of its viewport, and its colour scheme."""

    name: str
    width: int
    height: int
    scheme: str = "light"


SCREENS = (
    Screen("1280", 1280, 900),
    Screen("1024", 1024, 768),
    Screen("390", 390, 844),
    Screen("dark", 1280, 900, "dark"),
)


def main() -> None:
    """Take the first screen of each page, on each screen."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("pages", nargs="+", metavar="NAME=PAGE", help="a picture's name and an HTML page")
    parser.add_argument("--chromium", default="/usr/bin/chromium")
    parser.add_argument("--driver", default="/usr/bin/chromedriver")
    args = parser.parse_args()
    files = {name: Path(page).resolve() for name, _, page in (one.partition("=") for one in args.pages)}
    for name, file in files.items():
        if not file.is_file():  # Chromium would show a page of its own
            parser.error(f"{name}: there is no {file}")
    FOLDER.mkdir(exist_ok=True)
    for screen in SCREENS:
        with browser(args.chromium, args.driver, screen.scheme) as chrome:
            resize(chrome, screen.width, screen.height)
            for name, file in files.items():
                open_page(chrome, file)
                taken = chrome.execute_cdp_cmd("Page.captureScreenshot", {"format": "webp", "quality": QUALITY})
                (FOLDER / f"{name}-{screen.name}.webp").write_bytes(base64.b64decode(taken["data"]))


if __name__ == "__main__":
    main()
