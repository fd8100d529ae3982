"""Causes of failed starts that only SGLang's logs name; `assay.harness.engines.failures` has all others."""

from __future__ import annotations

import re

# fmt: off
CAUSES = tuple((cause, re.compile(pattern, re.IGNORECASE | re.DOTALL), remedy) for cause, pattern, remedy in (
    ("memory-share", r"no GPU memory for the KV cache.*?above (?:0\.(?:8[3-9]|9)|[1-9])", "use a smaller --model"),
    ("memory-share", r"leave no GPU memory for the KV cache.*?above 0\.(?:4[3-9]|[5-9])",
     "run one server at a time: --servers=in-turn --engine-arg=--mem-fraction-static=0.85"),
    ("memory-share", r"leave no GPU memory for the KV cache|(?:increase|raise) --mem-fraction-static",
     "repeat the command with --engine-arg=--mem-fraction-static=0.45, or 0.85 and --servers=in-turn where it had as much"),
))
# fmt: on
