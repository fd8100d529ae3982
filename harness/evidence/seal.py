"""The seal of a finished run: the hash of each file of its evidence. What was changed, removed or added later is noticed.

The seal stands in ``progress.json``, that of a bench or of a comparison of features in ``end.json``. It is no signature: whoever
rewrites that file too is believed.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from assay.harness.errors import EvidenceError
from assay.harness.files import file_hash
from assay.harness.text import few

# Suffixes of evidence. Logs, and what a reader puts beside it, are none.
_KINDS = frozenset({".json", ".jsonl", ".safetensors", ".i64"})
# Files that hold the seal, or are made again from evidence.
_NOT_SEALED = frozenset({"progress.json", "end.json", "counters.json", "report.json", "bench.json", "invariance.json"})
_MOST_NAMES = 3


def seal_of(folder: Path) -> dict[str, str]:
    """Hash each file of a run's evidence with SHA-256, by its path in the run's folder.

    Raises:
        EvidenceError: a file cannot be read.
    """
    hashes = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.suffix not in _KINDS or path.name.startswith(".") or name in _NOT_SEALED or not path.is_file():
            continue
        try:
            hashes[name] = file_hash(path)
        except OSError as error:
            raise EvidenceError(
                f"{path} cannot be read: {error.strerror}.", "evidence that can be read", "make it readable"
            ) from None
    return hashes


def check_seal(folder: Path, sealed: Mapping[str, str], stated: Mapping[str, str] = MappingProxyType({})) -> None:
    """Refuse evidence that is not as it was when its run ended.

    Args:
        sealed: `seal_of` the folder at that time, and `stated`; empty for a run that has not ended, where nothing is checked.
        stated: hashes of what the file with the seal itself states now.

    Raises:
        EvidenceError: a file was changed, removed or added.
    """
    if not sealed:
        return
    now = {**seal_of(folder), **stated}
    changed = sorted(name for name in sealed.keys() & now.keys() if sealed[name] != now[name])
    removed, added = sorted(sealed.keys() - now.keys()), sorted(now.keys() - sealed.keys())
    parts = (("changed", changed), ("removed", removed), ("added", added))
    if words := [
        f"{few(names, _MOST_NAMES)} {'was' if len(names) == 1 else 'were'} {what}" for what, names in parts if names
    ]:
        raise EvidenceError(
            f"The evidence in {folder} is not as it was when the run ended: {'; '.join(words)}.",
            f"the {len(sealed)} files of the run, unchanged",
            "restore them, or run again with a new --out",
        )
