"""A report of a finished run may take 1.5 s of CPU time, 0.7 s of it for imports; each of these takes a good part of that."""

from __future__ import annotations

import subprocess
import sys

HEAVY = ("torch", "scipy", "statsmodels", "pandas", "jsonschema", "openai", "aiohttp", "httpx", "transformers", "sglang")


def test_a_report_imports_nothing_heavy() -> None:
    code = (
        "import sys; from assay.harness.judge import build; from assay.reports import run_report, write; "
        f"print([name for name in {HEAVY!r} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"
