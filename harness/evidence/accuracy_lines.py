"""Lines in which an engine warns about its own accuracy, in a server's log: the worst kind first.

Sources: vLLM 0.27 to 0.32 (``layers/quantization/kv_cache.py``, ``config/cache.py``, ``config/model.py``, ``platforms/cpu.py``,
``model_executor/layers/utils.py``) and SGLang 0.4.6 to 0.5.23.
"""

from __future__ import annotations

import re

_LINES = tuple(map(re.compile, (
    # Using KV cache scaling factor 1.0 for fp8_e4m3. If this is unintended, verify that k/v_scale scaling factors are properly set
    r"(?i:scaling factors? (?:of )?1\.0\b)",
    # Checkpoint does not provide a q scaling factor. Setting it to k_scale.
    r"(?i:checkpoint does not provide a \w+ scaling factor)",
    r"(?i:uncalibrated \w+_scale)",
    # CPU_ATTN does not support logits softcap for ENCODER and ENCODER_ONLY, outputs may be slightly off
    r"(?i:outputs? (?:may|might) be (?:slightly )?(?:off|wrong|incorrect))",
    r"Attempted to load weight .* with dtype \S+ into parameter with dtype",
    r"(?i:\b(?:may|might|can|could|will) .{0,40}\b(?:less accurate|accuracy (?:drop|issue|loss|degrad)))",
    # Casting torch.float16 to torch.bfloat16. (Upcasting loses nothing.)
    r"\bCasting torch\.\w+ to torch\.\w*float16",
    # Default sampling parameters have been overridden by the model's Hugging Face generation config
    r"(?i:default sampling parameters (?:have been )?overridden)",
    # Failed to create oneDNN linear, fallback to torch linear.
    r"Failed to create oneDNN linear",
    # Cannot use FLASHINFER backend on CPU.
    r"Cannot use \w+ backend on",
)))  # fmt: skip
_PREFIX = re.compile(r"^.*?\[[\w.]+\.py:\d+\] ?|^\[[^\]]*\d\d:\d\d:\d\d[^\]]*\] ?")


def weight_of(line: str) -> int | None:
    """Return how much a line says about accuracy, 0 for the most, or None for a line that is no such warning."""
    return next((number for number, pattern in enumerate(_LINES) if pattern.search(line)), None)


def warned(log: str) -> list[str]:
    """List the warnings of a log about accuracy, each once and without its time and place, the worst first."""
    seen: dict[str, int] = {}
    for line in log.splitlines():
        if (weight := weight_of(line)) is not None:
            seen.setdefault(_PREFIX.sub("", line).strip(), weight)
    return sorted(seen, key=seen.__getitem__)
