"""Evidence in folders, in memory and in an object store: a real server of S3's protocol that runs here."""

from __future__ import annotations

import threading
from pathlib import Path
from uuid import uuid4

import pytest

from assay.harness.errors import EvidenceError, UsageError
from assay.harness.evidence.storage import Storage, open_storage, split_url

SECRET = "wJalrXUtnFEMI-secret-of-a-test"
"""The secret of the fixture object_store."""


@pytest.fixture(params=["folder", "file", "memory", "s3"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    """An empty storage of each kind."""
    if request.param == "s3":
        return open_storage(f"{request.getfixturevalue('object_store')}/{uuid4()}")
    if request.param == "memory":
        pytest.importorskip("fsspec")
        return open_storage(f"memory://{uuid4()}")
    return open_storage(tmp_path / "kept" if request.param == "folder" else f"file://{tmp_path}/kept")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A folder with files in it, one of them hidden."""
    for name, text in {"report.json": "{}", "servers/reference/calls.jsonl": "1\n2\n", "cause.log": "", ".lock": "7"}.items():
        path = tmp_path / "run" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path / "run"


def test_what_was_stored_comes_back_whole(storage: Storage, run: Path, tmp_path: Path) -> None:
    assert (storage.names(), storage.complete("nightly/1")) == ([], False)
    storage.put_folder(run, "nightly/1")
    assert (storage.names(), storage.complete("nightly/1")) == (["nightly/1"], True)
    storage.get_folder("nightly/1", tmp_path / "back")
    (run / ".lock").unlink()
    for folder in (run, tmp_path / "back"):
        files = {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
        assert files == {"report.json": b"{}", "servers/reference/calls.jsonl": b"1\n2\n", "cause.log": b""}
    assert storage.read_file("nightly/1", "report.json") == b"{}"
    assert storage.read_files(["nightly/1"], ["report.json", "cell.json"]) == {"nightly/1": {"report.json": b"{}"}}
    with pytest.raises(UsageError, match="exists"):
        storage.get_folder("nightly/1", tmp_path / "back")


def test_a_stored_folder_is_never_changed(storage: Storage, run: Path) -> None:
    storage.put_folder(run, "one")
    storage.put_folder(run, "one")
    (run / "report.json").write_text('{"verdict": "pass"}')
    with pytest.raises(EvidenceError, match=r"already, with other content: report\.json"):
        storage.put_folder(run, "one")
    assert not storage.create("one/report.json", b"[]"), "nor is a file"
    assert storage.read_file("one", "report.json") == b"{}"


def test_changed_bytes_are_noticed_on_arrival(storage: Storage, run: Path, tmp_path: Path) -> None:
    # What was not in the list, or is not as it says: an upload that died left a part of a file.
    assert storage.create("one/report.json", b"{")
    storage.put_folder(run, "one")
    storage.get_folder("one", tmp_path / "back")
    assert (tmp_path / "back" / "report.json").read_text() == "{}"
    # Bytes that changed after they were stored.
    lists = storage.read("stored/one.json")
    assert lists is not None
    assert storage.create("stored/two.json", lists)
    assert storage.create("two/report.json", b"{")
    listed = lists.replace(b'"one/', b'"two/')
    assert storage.create("stored/three.json", listed)
    for name, problem in (("two", "has no two/"), ("three", "has no three/")):
        with pytest.raises(EvidenceError, match=problem):
            storage.get_folder(name, tmp_path / name)
        assert not (tmp_path / name).exists()
        assert not list(tmp_path.glob(".*part")), "nothing is left"
    for name in ("servers/reference/calls.jsonl", "cause.log"):
        assert storage.create(f"three/{name}", b"other")
    with pytest.raises(EvidenceError, match="is not as it was stored"):
        storage.get_folder("three", tmp_path / "three")
    assert not (tmp_path / "three").exists()


def test_an_upload_that_died_is_not_there_and_can_be_repeated(storage: Storage, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    create = type(storage).create

    def dying(self: Storage, key: str, content: bytes | Path) -> bool:
        if key.startswith("stored/"):
            raise EvidenceError("The network is gone.")
        return create(self, key, content)

    with monkeypatch.context() as patch:
        patch.setattr(type(storage), "create", dying)
        with pytest.raises(EvidenceError, match="gone"):
            storage.put_folder(run, "one")
    assert (storage.names(), storage.complete("one")) == ([], False)
    with pytest.raises(EvidenceError, match="no complete one"):
        storage.read_file("one", "report.json")
    (run / "report.json").write_text("[]")
    storage.put_folder(run, "one")
    assert storage.read_file("one", "report.json") == b"[]"


def test_of_two_who_store_at_once_one_wins_whole(storage: Storage, run: Path, tmp_path: Path) -> None:
    if storage.url.startswith("memory:"):
        pytest.skip("fsspec's memory of one process looks whether a file is there, then writes: two threads may both be the first")
    folders = []
    for number in range(4):
        folder = tmp_path / f"run-{number}"
        folder.mkdir()
        for name in ("a.json", "b.json", "report.json"):
            (folder / name).write_text(f"{name} of {number}")
        folders.append(folder)
    refused: list[EvidenceError] = []

    def put(folder: Path) -> None:
        try:
            storage.put_folder(folder, "one")
        except EvidenceError as error:
            refused.append(error)

    threads = [threading.Thread(target=put, args=(folder,)) for folder in folders]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(refused) == 3, refused
    storage.get_folder("one", tmp_path / "back")
    assert len({path.read_text().split()[-1] for path in (tmp_path / "back").iterdir()}) == 1, "all of one writer"


@pytest.mark.parametrize("name", ["", "../out", "a/../b", "/a", "a//b", ".hidden", "stored/x", "rows", "a b"])
def test_a_name_that_leads_elsewhere_is_refused(tmp_path: Path, run: Path, name: str) -> None:
    with pytest.raises(UsageError, match="cannot be the name"):
        open_storage(tmp_path / "kept").put_folder(run, name)
    assert not (tmp_path / "kept").exists()


@pytest.mark.parametrize("url", [f"s3://key:{SECRET}@evidence/x", f"s3://evidence/x?secret={SECRET}", f"gs://evidence/x#{SECRET}"])
def test_a_url_with_a_secret_is_refused_and_not_repeated(url: str) -> None:
    with pytest.raises(UsageError, match="environment variables") as refused:
        open_storage(url)
    assert SECRET not in str(refused.value)


def test_no_secret_is_stored(object_store: str, run: Path) -> None:
    import s3fs

    place = f"{object_store}/{uuid4()}"
    open_storage(place).put_folder(run, "one")
    files = s3fs.S3FileSystem(skip_instance_cache=True)
    stored = [files.cat_file(path) for path in files.find(place)]
    assert len(stored) == 4
    for content in stored:
        assert SECRET.encode() not in content
        assert b"AKIAOFATEST" not in content


def test_a_storage_that_cannot_be_reached_says_what_to_set(object_store: str, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(EvidenceError, match="no such place"):
        open_storage("s3://no-such-bucket/x").put_folder(run, "one")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    with pytest.raises(EvidenceError, match="AWS_SECRET_ACCESS_KEY") as failed:
        open_storage("s3://evidence/unreachable").names()
    assert SECRET not in str(failed.value)


@pytest.mark.parametrize(("url", "expected"), [("s3://b/runs/x", ("s3://b/runs", "x")), ("s3://b/x/", ("s3://b", "x"))])
def test_the_last_part_of_a_url_is_the_name(url: str, expected: tuple[str, str]) -> None:
    assert split_url(url) == expected


@pytest.mark.parametrize("url", ["s3://bucket", "s3://", "s3://b/a b"])
def test_a_url_without_a_name_is_refused(url: str) -> None:
    with pytest.raises(UsageError, match="names no folder"):
        split_url(url)


def test_a_scheme_that_nobody_knows_and_a_package_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("fsspec")
    with pytest.raises(UsageError, match="is no storage"):
        open_storage("nonsense://x/y")
    monkeypatch.setattr("assay.harness.extras.missing_packages", lambda extra: ["fsspec"])
    with pytest.raises(UsageError, match="needs packages"):
        open_storage("s3://evidence/x")
