"""Takes a screenshot: ``python docs/screenshot.py runs/ID/report.html docs/report.png`` (needs Chromium and selenium)."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from selenium.webdriver import Chrome, ChromeOptions
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.support.wait import WebDriverWait

FLAGS = (
    "--headless=new --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --hide-scrollbars --disable-dev-shm-usage"
).split()


@contextmanager
def browser(chromium: str, driver: str, scheme: str = "light", scripts: bool = True) -> Iterator[Chrome]:
    """A headless Chromium with an empty profile, which logs console and network events."""
    with tempfile.TemporaryDirectory() as profile:
        options = ChromeOptions()
        options.binary_location = chromium
        for flag in (*FLAGS, f"--user-data-dir={profile}"):
            options.add_argument(flag)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
        options.add_experimental_option(
            "prefs", {"profile.managed_default_content_settings.javascript": 1 if scripts else 2}
        )
        chrome = Chrome(options=options, service=Service(driver))
        try:
            features = [{"name": "prefers-color-scheme", "value": scheme}]
            chrome.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
            yield chrome
        finally:
            chrome.quit()


def resize(chrome: Chrome, width: int, height: int) -> None:
    """Set the viewport of the page in CSS pixels; a window itself cannot be narrower than about 500."""
    metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
    chrome.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)


def open_page(chrome: Chrome, page: Path) -> None:
    """Open the page and wait until it is there: on a busy machine, the driver may return while the page before is shown."""
    address = page.resolve().as_uri()
    chrome.get(address)
    state = "return [location.href, document.readyState]"
    WebDriverWait(chrome, 60).until(lambda shown: shown.execute_script(state) == [address, "complete"])


def main() -> None:
    """Take the screenshot."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("page", type=Path)
    parser.add_argument("image", type=Path)
    parser.add_argument("--width", type=int, default=1200)
    parser.add_argument("--height", type=int, default=1150)
    parser.add_argument(
        "--from-element", help="CSS selector of the element to scroll to the top; by default the page is not scrolled"
    )
    parser.add_argument("--scheme", choices=["light", "dark"], default="light")
    parser.add_argument("--chromium", default="/usr/bin/chromium")
    parser.add_argument("--driver", default="/usr/bin/chromedriver")
    args = parser.parse_args()
    with browser(args.chromium, args.driver, args.scheme) as chrome:
        resize(chrome, args.width, args.height)
        open_page(chrome, args.page)
        if args.from_element:
            chrome.execute_script("document.querySelector(arguments[0]).scrollIntoView()", args.from_element)
        chrome.save_screenshot(str(args.image))


if __name__ == "__main__":
    main()
