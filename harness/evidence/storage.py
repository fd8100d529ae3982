"""Where evidence is kept beyond one machine: a folder, or a URL that fsspec opens, such as ``s3://bucket/assay``.

A stored folder is written once. It is complete once the list of its files with their hashes is there, which is written last; what
is fetched is compared with it. Secrets come from the environment alone: a URL that holds one is refused, and none is recorded.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import threading
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from pydantic import ConfigDict, Field, ValidationError

from assay.harness.errors import EvidenceError, UsageError
from assay.harness.evidence.seal import file_hash
from assay.harness.extras import install, require
from assay.harness.schema import Record
from assay.harness.text import one_line

_LISTS = "stored"
"""Folder of the lists: of the name ``a/b``, ``stored/a/b.json``. Below the root, names are looked up without listing evidence."""
ROWS = "rows"
"""Folder of the Parquet files of `assay.harness.history`."""
_NAME = re.compile(r"[A-Za-z0-9_][\w.+=-]*(/[A-Za-z0-9_][\w.+=-]*)*", re.ASCII)
_LAST = frozenset({"report.json", "cell.json"})
"""Files that say that there is a result."""
_TOGETHER = 16
"""Files that are on their way at once."""


class _StoredFolder(Record):
    """``stored/NAME.json``: the files of a stored folder."""

    model_config = ConfigDict(populate_by_name=True, serialize_by_alias=True)

    schema_id: Literal["assay.stored/1"] = Field("assay.stored/1", alias="schema")
    files: dict[str, str] = Field(description="SHA-256 by path in the folder")
    at: dict[str, str] = Field(
        {},
        description="where a file lies whose place an upload took that never ended, by path; the others lie at their path",
    )


def is_url(text: str) -> bool:
    """Return True if a text names a place by its scheme, such as ``s3://bucket``, and not a path."""
    return "://" in text


def open_storage(url: str | Path) -> Storage:
    """Open a folder, or a URL that fsspec knows. Nothing is made or asked yet.

    Raises:
        UsageError: the URL holds a secret, is none of a storage, or needs packages that are not installed.
    """
    text = str(url)
    if not is_url(text):
        return _Folder(text, Path(text).expanduser())
    parts = urlsplit(text)
    shown = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"
    if "@" in parts.netloc or parts.query or parts.fragment:
        raise UsageError(
            f"The URL {shown} was given with credentials or a query.",
            "the place alone, such as s3://bucket/assay",
            "leave them out, and set the storage's environment variables, such as AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
        )
    if parts.scheme == "file" and not parts.netloc:
        return _Folder(text, Path(parts.path))
    return _Remote(text.rstrip("/"))


def split_url(url: str) -> tuple[str, str]:
    """Split the URL of a stored folder into its storage and its name, which is the last part.

    Raises:
        UsageError: it has no last part that can be a name.
    """
    place, _, name = url.rstrip("/").rpartition("/")
    if place.endswith(("/", ":")) or not _NAME.fullmatch(name):
        raise UsageError(
            f"{url if '@' not in url else 'The URL'} names no folder in a storage.",
            "such as s3://bucket/runs/NAME",
            "add a name of letters, digits and _ . + = -",
        )
    return place, name


class Storage(ABC):
    """A place for evidence.

    Args:
        url: as it was given: a path or a URL.
    """

    def __init__(self, url: str) -> None:
        self.url = url

    def put_folder(self, local: Path, name: str) -> None:
        """Store a folder under a name: every file but hidden ones. To store the same once more changes nothing.

        Raises:
            EvidenceError: other files are stored under that name, or the storage cannot be written.
            UsageError: the name cannot be one.
        """
        _check_name(name)
        paths = sorted(p for p in local.rglob("*") if p.is_file() and not _hidden(p.relative_to(local)))
        with _reading(local):
            files = {path.relative_to(local).as_posix(): file_hash(path) for path in paths}
        if self._same(name, files):
            return
        at = self._put_files(local, name, files, files.keys() - _LAST) | self._put_files(
            local, name, files, files.keys() & _LAST
        )
        document = _StoredFolder(files=files, at=at).model_dump_json(by_alias=True, indent=1).encode()
        if not self.create(_list_of(name), document) and not self._same(name, files):
            raise EvidenceError(
                f"{name} in {self.url} vanished while it was stored.", "a storage that keeps what it has"
            )

    def get_folder(self, name: str, local: Path) -> None:
        """Fetch a stored folder, all of it or nothing.

        Args:
            name: that it was stored under.
            local: a folder that does not exist yet.

        Raises:
            EvidenceError: it is not complete there, or is not as it was stored.
            UsageError: `local` exists.
        """
        stored = self._stored(name)
        if local.exists():
            raise UsageError(f"{local} exists.", "a new folder", "remove it, or name another one")
        part = local.with_name(f".{local.name}.{os.getpid()}.part")

        def fetch(file: str) -> None:
            place = part / file
            place.parent.mkdir(parents=True, exist_ok=True)
            self._fetch(stored.at.get(file, f"{name}/{file}"), place)
            self._check_hash(name, file, file_hash(place), stored)

        try:
            part.mkdir(parents=True)
            with ThreadPoolExecutor(_TOGETHER) as pool:
                list(pool.map(fetch, stored.files))
            part.rename(local)
        except OSError as error:
            raise EvidenceError(
                f"{local} cannot be written: {error.strerror or error}.",
                "a writable folder on a disk with free space",
                "free some space, or choose another folder",
            ) from None
        finally:
            shutil.rmtree(part, ignore_errors=True)

    def read_file(self, name: str, file: str) -> bytes:
        """Read a file of a stored folder.

        Raises:
            EvidenceError: the folder is not complete, has no such file, or the file is not as it was stored.
        """
        return self._read_file(name, file, self._stored(name))

    def read_files(self, names: Collection[str], wanted: Collection[str]) -> dict[str, dict[str, bytes]]:
        """Read files of several stored folders: by name and file, those that are there."""

        def read(name: str) -> dict[str, bytes]:
            stored = self._stored(name)
            return {file: self._read_file(name, file, stored) for file in wanted if file in stored.files}

        with ThreadPoolExecutor(_TOGETHER) as pool:
            return dict(zip(names, pool.map(read, names), strict=True))

    def names(self) -> list[str]:
        """List the folders that are complete, sorted."""
        return sorted(
            key[len(_LISTS) + 1 :].removesuffix(".json") for key in self.keys(_LISTS) if key.endswith(".json")
        )

    def complete(self, name: str) -> bool:
        """Return True if all files of a folder were stored."""
        _check_name(name)
        return self._list_file(name) is not None

    def file_hashes(self, name: str) -> Mapping[str, str]:
        """SHA-256 by path of the files of a stored folder."""
        return self._stored(name).files

    @abstractmethod
    def create(self, key: str, content: bytes | Path) -> bool:
        """Write a file that must not be there: whole, or not at all.

        Args:
            key: its path below the root.
            content: of the file, or the file that has it.

        Returns:
            False if it is there already; it is left as it is.

        Raises:
            EvidenceError: the storage cannot be written.
        """

    @abstractmethod
    def read(self, key: str) -> bytes | None:
        """Read a file by its path below the root; None if there is none."""

    @abstractmethod
    def keys(self, folder: str) -> list[str]:
        """List the files in a folder and below, as paths below the root; none where there is no such folder."""

    @abstractmethod
    def _fetch(self, key: str, local: Path) -> None: ...

    def _put_files(self, local: Path, name: str, files: Mapping[str, str], which: Collection[str]) -> dict[str, str]:
        """Write files, and return where those lie that could not lie at their path."""

        def put(file: str) -> tuple[str, str]:
            key = f"{name}/{file}"
            if not self.create(key, local / file):
                there = self.read(key)
                if there is None or hashlib.sha256(there).hexdigest() != files[file]:
                    # An upload that died, or goes on beside this one, took the place. No list has its bytes.
                    key = f"{key}~{files[file][:12]}"
                    self.create(key, local / file)
            return file, key

        with ThreadPoolExecutor(_TOGETHER) as pool:
            return {file: key for file, key in pool.map(put, sorted(which)) if key != f"{name}/{file}"}

    def _same(self, name: str, files: Mapping[str, str]) -> bool:
        """Return True if these files are stored already, and False if nothing is.

        Raises:
            EvidenceError: others are.
        """
        there = self._list_file(name)
        if there is None:
            return False
        if there.files == files:
            return True
        differing = sorted(
            file for file in there.files.keys() | files.keys() if there.files.get(file) != files.get(file)
        )
        raise EvidenceError(
            f"{self.url} has {name} already, with other content: {one_line(', '.join(differing), 200)}.",
            "a name that is new there: what is stored is never changed",
            "choose another name",
        )

    def _list_file(self, name: str) -> _StoredFolder | None:
        content = self.read(_list_of(name))
        if content is None:
            return None
        try:
            return _StoredFolder.model_validate_json(content)
        except ValidationError as error:
            raise EvidenceError(
                f"{_list_of(name)} in {self.url} is damaged: {error.errors(include_url=False)[0]['msg']}.",
                "the list of files that assay wrote",
                "store the folder again under another name",
            ) from None

    def _stored(self, name: str) -> _StoredFolder:
        _check_name(name)
        stored = self._list_file(name)
        if stored is None:
            raise EvidenceError(
                f"{self.url} has no complete {name}.",
                "a folder that was stored",
                f"see what is there: assay runs {self.url}",
            )
        return stored

    def _read_file(self, name: str, file: str, stored: _StoredFolder) -> bytes:
        content = self.read(stored.at.get(file, f"{name}/{file}")) if file in stored.files else None
        if content is None:
            raise EvidenceError(f"{name} in {self.url} has no {file}.", "a file that was stored", "check the name")
        self._check_hash(name, file, hashlib.sha256(content).hexdigest(), stored)
        return content

    def _check_hash(self, name: str, file: str, found: str, stored: _StoredFolder) -> None:
        if found != stored.files[file]:
            raise EvidenceError(
                f"{file} of {name} in {self.url} is not as it was stored.",
                f"SHA-256 {stored.files[file]}, found {found}",
                "restore it there, or run again under another name",
            )


class _Folder(Storage):
    """A folder of this machine, without fsspec."""

    def __init__(self, url: str, root: Path) -> None:
        super().__init__(url)
        self._root = root

    def create(self, key: str, content: bytes | Path) -> bool:
        place = self._root / key
        part = place.with_name(f".{place.name}.{os.getpid()}-{threading.get_ident()}.part")
        try:
            place.parent.mkdir(parents=True, exist_ok=True)
            if isinstance(content, bytes):
                part.write_bytes(content)
            else:
                shutil.copyfile(content, part)
            with part.open("rb") as file:
                os.fsync(file.fileno())
            os.link(part, place)  # unlike a rename, it fails where something is
        except FileExistsError:
            return False
        except OSError as error:
            raise EvidenceError(
                f"{place} cannot be written: {error.strerror or error}.",
                "a writable folder on a disk with free space",
                "free some space, or choose another place",
            ) from None
        finally:
            with suppress(OSError):
                part.unlink()
        return True

    def read(self, key: str) -> bytes | None:
        try:
            with _reading(self._root / key):
                return (self._root / key).read_bytes()
        except FileNotFoundError:
            return None

    def keys(self, folder: str) -> list[str]:
        below = (path.relative_to(self._root) for path in (self._root / folder).rglob("*") if path.is_file())
        return sorted(path.as_posix() for path in below if not _hidden(path))

    def _fetch(self, key: str, local: Path) -> None:
        try:
            with _reading(self._root / key):
                shutil.copyfile(self._root / key, local)
        except FileNotFoundError:
            raise _gone(key, self.url) from None


class _Remote(Storage):
    """A URL that fsspec opens."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        require("fleet", f"{urlsplit(url).scheme}://")
        import fsspec

        try:
            # What other processes write must be seen, and what the environment says now holds, so nothing is remembered.
            options = {"use_listings_cache": False, "skip_instance_cache": True}
            self._fs, self._root = fsspec.core.url_to_fs(url, **options)
        except ImportError as error:
            raise UsageError(
                f"{urlsplit(url).scheme}:// needs a package: {one_line(str(error))}",
                "the package of fsspec for this storage",
                f"{install('fleet')} for s3://; for others, the package named above",
            ) from None
        except ValueError as error:
            raise UsageError(
                f"{url} is no storage: {one_line(str(error))}", "a folder, or a URL of fsspec such as s3://", "check it"
            ) from None

    def _at(self, key: str) -> str:
        return f"{self._root.rstrip('/')}/{key}"

    def create(self, key: str, content: bytes | Path) -> bool:
        try:
            with self._asking("written"):
                try:
                    if isinstance(content, bytes):
                        self._fs.pipe_file(self._at(key), content, mode="create")
                    else:
                        self._fs.put_file(str(content), self._at(key), mode="create")
                except OSError:  # S3 says "invalid argument" of what exists
                    if self._fs.exists(self._at(key)):
                        return False
                    raise
        except FileNotFoundError:
            raise EvidenceError(
                f"{self.url} cannot be written: there is no such place.",
                "a bucket that exists",
                "make it, or check the URL",
            ) from None
        return True

    def read(self, key: str) -> bytes | None:
        try:
            with self._asking("read"):
                return bytes(self._fs.cat_file(self._at(key)))
        except FileNotFoundError:
            return None

    def keys(self, folder: str) -> list[str]:
        try:
            with self._asking("read"):
                paths = self._fs.find(self._at(folder))
        except FileNotFoundError:
            return []
        start = len(self._at(""))
        return sorted(str(path)[start:] for path in paths)

    def _fetch(self, key: str, local: Path) -> None:
        try:
            with self._asking("read"):
                self._fs.get_file(self._at(key), str(local))
        except FileNotFoundError:
            raise _gone(key, self.url) from None

    @contextmanager
    def _asking(self, doing: str) -> Iterator[None]:
        """Say what is wrong with the storage, whatever its library raises; a missing file is left to the caller."""
        try:
            yield
        except FileNotFoundError:
            raise
        except Exception as error:
            raise EvidenceError(
                f"{self.url} cannot be {doing}: {type(error).__name__}: {one_line(str(error))}",
                "a storage that can be reached, with its credentials in the environment",
                "set them, such as AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_ENDPOINT_URL for another S3 than Amazon's",
            ) from error


def _list_of(name: str) -> str:
    return f"{_LISTS}/{name}.json"


def _check_name(name: str) -> None:
    if not _NAME.fullmatch(name) or name.partition("/")[0] in (_LISTS, ROWS):
        raise UsageError(
            f"{one_line(name)!r} cannot be the name of a stored folder.",
            f"letters, digits and _ . + = -, in parts between slashes; not {_LISTS} or {ROWS}",
            "choose another name",
        )


def _hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def _gone(key: str, url: str) -> EvidenceError:
    return EvidenceError(
        f"{url} has no {key}.", "all files that were stored", "restore it, or run again under another name"
    )


@contextmanager
def _reading(path: Path) -> Iterator[Any]:
    try:
        yield
    except FileNotFoundError:
        raise
    except OSError as error:
        raise EvidenceError(
            f"{path} cannot be read: {error.strerror or error}.", "files that can be read", "make them readable"
        ) from None
