"""Runs in storages, as commands name them: ``--out URL`` and the URL of a run that is there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from assay.harness.cli.app import say
from assay.harness.config import RUNS
from assay.harness.errors import UsageError
from assay.harness.evidence.cell import CELLS, FILE, LOG, OUT
from assay.harness.evidence.seal import file_hash
from assay.harness.evidence.storage import is_url, open_storage, split_url
from assay.harness.files import shown
from assay.harness.judge.history import is_run

_MANIFEST = "manifest.json"


def destination(out: str) -> tuple[Path, Callable[[bool], None] | None]:
    """Return where a run is made, and what stores it if `out` is a URL: a function that is told whether the run has ended.

    Raises:
        UsageError: the storage has that name already. Nothing was started.
        EvidenceError: it cannot be reached.
    """
    if not is_url(out):
        return Path(out), None
    place, name = split_url(out)
    storage, folder = open_storage(place), RUNS / name
    if storage.complete(name):
        raise UsageError(
            f"{place} has {name} already.", "a new name: what is stored is never changed", "name another one with --out"
        )

    def store(ended: bool) -> None:
        if ended:
            storage.put_folder(folder, name)
            say(f"Stored: {out}")
        else:
            say(
                f"Not stored: the run has not ended. What was measured is in {shown(folder)}; the same command goes on with it."
            )

    return folder, store


def fetched(run: str) -> Path:
    """Return the folder of a run: fetched into ``runs`` if a URL names it, unless it is there already.

    A cell of a sweep is fetched into the sweep's folder in ``runs``, and stands for the run that it holds.

    Raises:
        UsageError: another run is there, or the cell holds none.
        EvidenceError: it is not complete in the storage, or is not as it was stored.
    """
    if not is_url(run):
        return run_in(Path(run))
    place, name = split_url(run)
    manifest, below = _MANIFEST, ""
    if place.endswith(f"/{CELLS}"):
        place, below = split_url(place.removesuffix(f"/{CELLS}"))
        place, name, manifest = f"{place}/{below}", f"{CELLS}/{name}", FILE
    storage, folder = open_storage(place), RUNS / below / name
    if not folder.exists():
        storage.get_folder(name, folder)
    elif not (folder / manifest).is_file() or file_hash(folder / manifest) != storage.file_hashes(name).get(manifest):
        raise UsageError(f"{folder} is another run than {run}.", "a free place for it", f"move {folder} elsewhere")
    return run_in(folder)


def run_in(folder: Path) -> Path:
    """Return the folder of the run that a cell of a sweep holds; any other path as it is.

    Raises:
        UsageError: the cell holds no run.
    """
    if not (folder / FILE).is_file():
        return folder
    if is_run(folder / OUT):
        return folder / OUT
    raise UsageError(
        f"{folder} is a cell of a sweep that holds no run.",
        "a cell of assay run",
        f"see its log: {shown(folder / LOG)}",
    )
