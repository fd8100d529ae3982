"""``common-settings.json``: flags that both servers of a run are given because one of the backends forces them."""

from __future__ import annotations

from assay.harness.evidence.nonce import RunRecord
from assay.harness.evidence.run_file import RunFile


class CommonSettings(RunRecord):
    """The settings that make two servers' arguments agree.

    Attributes:
        flags: flags of both servers, in addition to assay's own; empty if they agree without any.
        because: why, a sentence each.
        impossible: arguments that no flag makes equal, and why, a sentence each.
    """

    flags: tuple[str, ...] = ()
    because: tuple[str, ...] = ()
    impossible: tuple[str, ...] = ()


COMMON_SETTINGS = RunFile("common-settings.json", CommonSettings)
