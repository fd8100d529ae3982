"""Signals that end a run like Ctrl-C: a CI's cancel sends SIGTERM, a closed terminal SIGHUP."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

SIGNALS = (signal.SIGTERM, signal.SIGHUP)


@contextmanager
def like_ctrl_c() -> Iterator[None]:
    """Within the context, the first of `SIGNALS` raises KeyboardInterrupt in the main thread, so that servers are stopped and a
    report is written; those that follow are ignored, so that this is not cut short.

    A signal that the process ignores (``nohup``) or handles itself is left alone. Outside of the main thread, which alone
    can handle signals, nothing changes.
    """
    received = False

    def interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal received
        if not received:
            received = True
            raise KeyboardInterrupt

    mine = threading.current_thread() is threading.main_thread()
    changed = [number for number in SIGNALS if mine and signal.getsignal(number) == signal.SIG_DFL]
    for number in changed:
        signal.signal(number, interrupt)
    try:
        yield
    finally:
        for number in changed:
            signal.signal(number, signal.SIG_DFL)
