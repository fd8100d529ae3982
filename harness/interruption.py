"""Signals that end a run like Ctrl-C: cancelling a CI job sends SIGTERM, closing a terminal SIGHUP."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import FrameType

_SIGNALS = (signal.SIGTERM, signal.SIGHUP)
# Seconds after which an interruption that a destructor swallowed is raised again.
_AGAIN_S = 0.02


@contextmanager
def like_ctrl_c() -> Iterator[None]:
    """Raise KeyboardInterrupt in the main thread at the first of `_SIGNALS`, within the context.

    Servers are then stopped and a report is written. Signals that follow are ignored, so as not to cut this short.

    A signal that the process ignores (``nohup``) or handles itself is left alone. Outside the main thread, which alone can handle
    signals, nothing changes.
    """
    received = False

    def interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal received
        if not received:
            received = True
            raise KeyboardInterrupt

    mine = threading.current_thread() is threading.main_thread()
    changed = [number for number in _SIGNALS if mine and signal.getsignal(number) == signal.SIG_DFL]
    for number in changed:
        signal.signal(number, interrupt)
    with _not_swallowed() if mine else nullcontext():
        try:
            yield
        finally:
            for number in changed:
                signal.signal(number, signal.SIG_DFL)


@contextmanager
def too_late() -> Iterator[None]:
    """Ignore `_SIGNALS` within the context: the work is about to end anyway, and its report is being made.

    A signal that the process ignores stays ignored, and outside the main thread nothing changes.
    """
    mine = threading.current_thread() is threading.main_thread()
    before = {number: signal.getsignal(number) for number in _SIGNALS if mine}
    changed = {number: handler for number, handler in before.items() if handler not in (signal.SIG_IGN, None)}
    for number in changed:
        signal.signal(number, lambda *_: None)
    try:
        yield
    finally:
        for number, handler in changed.items():
            signal.signal(number, handler)


@contextmanager
def _not_swallowed() -> Iterator[None]:
    """Within the context, re-raise a KeyboardInterrupt that was raised in a destructor, where Python ignores it."""
    before, main = sys.unraisablehook, threading.get_ident()

    def again(ignored: sys.UnraisableHookArgs) -> None:
        if not issubclass(ignored.exc_type, KeyboardInterrupt):
            before(ignored)
            return
        signal.signal(signal.SIGINT, signal.default_int_handler)
        repeated = threading.Timer(_AGAIN_S, signal.pthread_kill, (main, signal.SIGINT))
        repeated.daemon = True
        repeated.start()

    sys.unraisablehook = again
    try:
        yield
    finally:
        sys.unraisablehook = before
