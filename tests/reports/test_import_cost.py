"""A report of a finished run may take 1.5 s of CPU time, 0.7 s of it for imports; each of these takes a good part of that.

`assay check` computes in a process of its own: the process that shows its result needs none of these.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = ("torch", "scipy", "statsmodels", "pandas", "jsonschema", "openai", "aiohttp", "httpx", "transformers", "sglang")


@pytest.mark.parametrize(
    "imports",
    [
        "from assay.harness.judge import build; from assay.reports import run_report, write",
        "from assay.harness.checks import jobs; from assay.reports import check",
    ],
    ids=["run", "check"],
)
def test_a_report_imports_nothing_heavy(imports: str) -> None:
    code = f"import sys; {imports}; print([name for name in {HEAVY!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"
