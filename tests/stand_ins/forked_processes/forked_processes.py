"""A plugin of SGLang that forks a server's processes: each would import what the first has imported, in six seconds of CPU time.

Tests that are marked slow start servers without it, as users do.
"""

from __future__ import annotations

import multiprocessing


def install() -> None:
    """Have SGLang choose this start method, whatever it asks for."""
    choose = multiprocessing.set_start_method
    multiprocessing.set_start_method = lambda method, force=False: choose("fork", force=True)  # type: ignore[assignment]
