"""``common-settings.json``: flags that both servers of a run are given because one of the backends forces them."""

from __future__ import annotations

from pathlib import Path

from assay.harness.evidence.nonce import check_run
from assay.harness.files import write_whole
from assay.harness.schema import Record, read_json

_FILE = "common-settings.json"


class CommonSettings(Record):
    """What makes two servers' arguments agree.

    Attributes:
        run: nonce of the run.
        flags: flags of both servers, in addition to assay's own; empty if they agree without any.
        because: why, a sentence each.
        impossible: arguments that no flag makes equal, and why, a sentence each.
    """

    run: str = ""
    flags: tuple[str, ...] = ()
    because: tuple[str, ...] = ()
    impossible: tuple[str, ...] = ()


def write_common_settings(folder: Path, settings: CommonSettings) -> None:
    """Write a run's common settings. Raises EvidenceError if they cannot be written."""
    write_whole(folder / _FILE, settings.model_dump_json(indent=2))


def read_common_settings(folder: Path, run: str = "") -> CommonSettings | None:
    """A run's common settings; None if they were not looked for.

    Args:
        folder: the run's.
        run: the nonce that the file must carry; empty to accept any.

    Raises:
        EvidenceError: the file is damaged, or belongs to another run.
    """
    path = folder / _FILE
    if not path.exists():
        return None
    settings = read_json(path, CommonSettings, "remove it and repeat the run's command with --out set to this folder")
    check_run(path, settings.run, run)
    return settings
