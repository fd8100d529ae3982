"""Signals that end a run like Ctrl-C: a CI's cancel sends SIGTERM, a closed terminal SIGHUP."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import FrameType

_SIGNALS = (signal.SIGTERM, signal.SIGHUP)
# Seconds after which an interruption that a destructor has swallowed comes again.
_AGAIN_S = 0.02


@contextmanager
def like_ctrl_c() -> Iterator[None]:
    """Raise KeyboardInterrupt in the main thread at the first of `_SIGNALS`, within the context.

    Servers are then stopped and a report is written. Signals that follow are ignored, so that this is not cut short.

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
    """Ignore `_SIGNALS` within the context: what they would end is about to end, and its report is being made.

    A signal that the process ignores stays ignored, and outside of the main thread nothing changes.
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
    """Raise KeyboardInterrupt again that was raised in a destructor, where Python ignores it, within the context."""
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
