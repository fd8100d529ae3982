"""What 10,000 cells of sweeps cost those who look at them: seconds of a query, size of the page, seconds until a browser shows it.

    python -m benchmarks.history_scale [--models 25 --candidates 20 --nights 20] [--out FOLDER]

The cells are made up: records as a sweep leaves them, and the results of `assay check`. The page is opened in Chromium, from disk,
and "first paint" is the browser's own first contentful paint. Prints one table.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import runpy
import shutil
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from assay.harness.evidence.cell import CellRecord, write_cell
from assay.harness.history.table import RunTable
from assay.harness.history.trend import trend_of, usual_trends
from assay.harness.verdict import Verdict
from assay.reports.page import to_html
from assay.reports.runs import runs_document
from assay.reports.trend import trend_document

_WHY = (
    "Computes a causal mask top-left",
    "Leaves out the last key of a page",
    "Scales by 1 / head_dim",
    "Accumulates in bfloat16",
)


def make_cells(root: Path, models: int, candidates: int, nights: int) -> None:
    """Make sweeps of cells: each candidate's error varies, and every seventh one's rises at the middle night."""
    random = np.random.default_rng(0)
    for night in range(nights):
        commit = hashlib.sha1(str(night).encode()).hexdigest()
        for model in range(models):
            for candidate in range(candidates):
                worse = candidate % 7 == 3 and night >= nights // 2
                own = float(2e-3 * (6 if worse else 1) * np.exp(0.1 * random.normal()))
                bound = 5e-3
                verdict: Verdict = "regression" if own > bound else "error" if random.random() < 0.01 else "pass"
                axes = {
                    "model": f"organisation/model-{model:03}-instruct",
                    "candidate": f"package.kernels.v{candidate:03}:forward",
                }
                key = hashlib.sha256(f"{night}{axes}".encode()).hexdigest()[:16]
                record = CellRecord(
                    verdict=verdict,
                    key=key,
                    command=("check", axes["candidate"]),
                    axes=axes,
                    headline=f"{axes['candidate']}: worst own error {100 * own:.3f} %, {own / bound:.2f} times its bound",
                    problem="worker lost" if verdict == "error" else "",
                    seconds=float(random.uniform(5, 90)),
                    environment={"commit": commit},
                    created=f"2026-{1 + night // 28:02}-{1 + night % 28:02}T{2 + model % 20:02}:{candidate % 60:02}:00Z",
                )
                folder = root / f"nightly-{night:03}" / "cells" / key
                finding = {"id": "bug", "title": _WHY[candidate % 4], "severity": "serious"}
                result = {
                    "schema": "assay.check/1",
                    "kernel": axes["candidate"],
                    "worst_own": own,
                    "worst_bound": bound,
                }
                folder.mkdir(parents=True)
                if verdict != "error":
                    (folder / "result.json").write_text(
                        json.dumps(result | {"findings": [finding] if own > bound else []})
                    )
                write_cell(folder, record)


def first_paint(page: Path, picture: Path | None, width: int = 1280) -> tuple[float, float]:
    """Open a page in Chromium, and return the seconds until its first contentful paint, and those until it could be used."""
    screenshot = runpy.run_path(str(Path(__file__).parents[1] / "docs" / "screenshot.py"))
    chromium, driver = (shutil.which(name) for name in ("chromium", "chromedriver"))
    if not (chromium and driver):
        sys.exit("chromium and chromedriver are needed")
    with screenshot["browser"](chromium, driver) as chrome:
        screenshot["resize"](chrome, width, 900)
        chrome.get(page.resolve().as_uri())
        time.sleep(1)
        paint = "return performance.getEntriesByName('first-contentful-paint')[0].startTime"
        ready = "return performance.getEntriesByType('navigation')[0].loadEventEnd"
        times = chrome.execute_script(paint) / 1e3, chrome.execute_script(ready) / 1e3
        if picture:
            chrome.save_screenshot(str(picture))
        return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=int, default=25)
    parser.add_argument("--candidates", type=int, default=20)
    parser.add_argument("--nights", type=int, default=20)
    parser.add_argument("--out", type=Path, help="where cells, page and pictures are kept; by default nowhere")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        out = arguments.out or Path(scratch)
        root = out / "sweeps"
        if not root.exists():
            make_cells(root, arguments.models, arguments.candidates, arguments.nights)
        seconds: dict[str, tuple[float, float]] = {}

        def timed(what: str, begun: tuple[float, float]) -> None:
            seconds[what] = (time.perf_counter() - begun[0], time.process_time() - begun[1])

        start = (time.perf_counter(), time.process_time())
        history = RunTable(str(root))
        timed("first look: every cell is read, and its rows are kept", start)
        start = (time.perf_counter(), time.process_time())
        history = RunTable(str(root))
        timed("later looks: rows are loaded, and what is new is looked for", start)
        start = (time.perf_counter(), time.process_time())
        found = history.runs("model like '%model-007%' and verdict = 'regression'")
        timed(f"query: --where of a model and a verdict, {len(found.runs)} cells", start)
        start = (time.perf_counter(), time.process_time())
        listed = history.runs()
        timed(f"all {len(listed.runs):,} cells as a list", start)
        start = (time.perf_counter(), time.process_time())
        trend = trend_of(history, "own-error")
        timed(f"trend of the own error, {len(trend.series):,} series", start)
        (out / "trend.html").write_text(to_html(trend_document(trend)), encoding="utf-8")
        start = (time.perf_counter(), time.process_time())
        trends = usual_trends(history)
        (out / "runs.html").write_text(to_html(runs_document(listed, out, trends)), encoding="utf-8")
        timed("page made, trends included", start)
        for page in ("runs.html", "trend.html"):
            picture = out / f"{page}.png" if arguments.out else None
            paint, ready = first_paint(out / page, picture)
            seconds[f"{page}, {(out / page).stat().st_size / 1e6:.2f} MB: first paint"] = paint, 0.0
            seconds[f"{page}: filters work"] = ready, 0.0
        moved = sum(bool(series.moves) for series in trend.series)
        print(
            f"{arguments.models} models x {arguments.candidates} candidates x {arguments.nights} nights; {moved} series moved"
        )
        print("    wall       CPU")
        for what, (wall, cpu) in seconds.items():
            print(f"{wall:6.2f} s  {cpu:6.2f} s  {what}")


if __name__ == "__main__":
    main()
