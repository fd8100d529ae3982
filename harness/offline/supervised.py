"""`check`, `assert_correct` and `replay` for other programs: the kernel runs in a process of its own, as the commands have it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from assay.harness.attention.call import Kernel
from assay.harness.attention.matrix import Case
from assay.harness.evidence.cause import ReplayResult
from assay.harness.offline import check as checking
from assay.harness.offline import replay as replaying
from assay.harness.offline.check_result import CheckResult
from assay.harness.offline.interrupted import Known, interrupted, interrupted_replay
from assay.harness.offline.kernel_matrix import named
from assay.harness.offline.observed import Reader
from assay.harness.offline.own_process import Callbacks, Work, ended_early, in_own_process
from assay.harness.offline.watcher import Watcher

P = ParamSpec("P")
T = TypeVar("T")
_CALLBACKS = ("before_reading", "progress", "on_first")
"""Parameters that are functions of whoever asks for a check: they are called in its process, not in that of the kernel."""


def _bound(function: Callable[..., T], *positional: Any, **named: Any) -> Work[T]:
    """Make work of a function that takes a `watcher`, with its arguments. It can be pickled if they can."""
    return functools.partial(_do, functools.partial(function, *positional, **named))


def _do(function: Callable[..., T], watcher: Watcher, callbacks: Callbacks) -> T:
    return function(watcher=watcher, **callbacks)


def _in_own_process_of(ended: Callable[[Known], T]) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Have a function, which takes a `watcher`, run a kernel in a process of its own.

    Args:
        ended: makes its result if the kernel ends that process.
    """

    def of(function: Callable[P, T]) -> Callable[P, T]:
        @functools.wraps(function)
        def apart(*args: P.args, **kwargs: P.kwargs) -> T:
            __tracebackhide__ = True
            cases: Any = kwargs.get("cases") or ()
            callbacks: Any = {name: kwargs[name] for name in _CALLBACKS if name in kwargs}
            named = {name: value for name, value in kwargs.items() if name not in callbacks}
            shared = [*filter(callable, args), named.get("kernel"), *cases]
            return in_own_process(_bound(function, *args, **named), ended, shared=shared, callbacks=callbacks)

        return apart

    return of


def _of_check(known: Known) -> CheckResult:
    if known.asked is None:
        raise ended_early(known.how, "there is no verdict")
    return interrupted(known)


def _of_call(known: Known) -> None:
    __tracebackhide__ = True
    raise ended_early(known.how, f"it computed {known.call}")


def _of_replay(known: Known) -> ReplayResult:
    if not isinstance(known.result, ReplayResult):
        raise ended_early(known.how, "there is no verdict")
    return interrupted_replay(known.result, known)


check = _in_own_process_of(_of_check)(checking.check)
assert_correct = _in_own_process_of(_of_call)(checking.assert_correct)
replay = _in_own_process_of(_of_replay)(replaying.replay)


def check_and_read(kernel: str | Kernel, case: Case, again: str, reader: Reader) -> tuple[CheckResult, Reader]:
    """Check a kernel on one case.

    Args:
        kernel: as in `check`.
        case: the case.
        again: a command that repeats the check.
        reader: reads the kernel if it is wrong, unless it has.

    Returns:
        The result, and the reader with what it has read.
    """
    work = _bound(_check_and_read, kernel, case, again, reader)
    shared = (kernel, named(kernel)[1], case)
    return in_own_process(work, lambda known: (_of_check(known), reader), shared=shared)


def _check_and_read(
    kernel: str | Kernel, case: Case, again: str, reader: Reader, watcher: Watcher
) -> tuple[CheckResult, Reader]:
    phases = [case.condition["phase"]]
    made = checking.check(kernel, phases=phases, cases=[case], again=again, read_out=reader, watcher=watcher)
    return made, reader
