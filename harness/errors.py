"""Errors and their exit codes.

An error states what was found, what was expected and what to do. The user sees nothing else.
"""

from __future__ import annotations

from enum import IntEnum

GIT_ABORT = 128
"""Exit codes from here on blame the environment and stop ``git bisect run``."""


class ExitCode(IntEnum):
    """Exit codes of every command, for CI.

    ``assay bisect commits`` exits with 0 if it names a commit, and with 3 if it cannot. ``assay bisect layers`` exits with 0 if no
    layer needs the reference, with 1 if layers do, and with 3 if that is undecided; so does ``assay bisect sides`` with
    differences that break the candidate. ``assay bisect probe`` has git's codes
    instead: 0 good, 1 bad, 125 skip, 128 for a usage error or a broken environment.
    """

    PASS = 0
    REGRESSION = 1
    USAGE = 2
    NO_VERDICT = 3


class AssayError(Exception):
    """An error that ends a command with a message instead of a traceback.

    Args:
        found: what was found, on one line.
        expected: what was expected.
        do: what to do.
        details: lines that come after everything else, such as the end of a log.
    """

    exit_code = ExitCode.NO_VERDICT

    def __init__(self, found: str, expected: str = "", do: str = "", *, details: str = "") -> None:
        self.found, self.expected, self.do, self.details = found, expected, do, details
        lines = [found]
        if expected:
            lines.append(f"Expected: {expected}")
        if do:
            lines.append(f"What to do: {do}")
        if details:
            lines.append(details)
        super().__init__("\n".join(lines))


class UsageError(AssayError):
    """A usage error, detected before anything was started. Exit code 2."""

    exit_code = ExitCode.USAGE


class EngineError(AssayError):
    """A server died, hung or sent an invalid answer. Exit code 3: never an accuracy loss, never a pass.

    Args:
        found, expected, do, details: see `AssayError`.
        cause: id of the known cause (`assay.harness.engines.failures.CAUSES`), or empty if unknown.
    """

    def __init__(self, found: str, expected: str = "", do: str = "", *, details: str = "", cause: str = "") -> None:
        super().__init__(found, expected, do, details=details)
        self.cause = cause


class EvidenceError(AssayError):
    """A run's files cannot be written or read (full disk, damaged files, wrong folder). Exit code 3."""


class ChangedError(EvidenceError):
    """The server, or the code that it runs, is not the expected one. Exit code 3: nothing was compared."""
