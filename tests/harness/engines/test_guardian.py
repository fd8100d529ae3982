"""The guardian with real processes: nothing of a server may outlive it or assay, however either ends."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from assay.harness.engines.guardian import LOOK_AGAIN_S, _shared_files
from assay.harness.engines.process import ServerProcess

ROOT = Path(__file__).parents[3]

# A server in small: one child as SGLang's scheduler (in its group), and one that left the session, drops its parent and will
# not hear SIGTERM. Each writes its process id to a file named for it, and the main process says when all are there.
SERVER = """
import os, signal, sys, time
def note(name):
    open(name + ".part", "w").write(str(os.getpid()))
    os.rename(name + ".part", name)
if os.fork() == 0:
    note("scheduler")
    time.sleep(600)
if os.fork() == 0:
    os.setsid()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if os.fork() == 0:
        note("escaped")
        time.sleep(600)
    os._exit(0)
note("main")
time.sleep(600)
"""
NAMES = ("main", "scheduler", "escaped")


def launch(folder: Path, *words: str) -> ServerProcess:
    """Launch a command, or code of Python."""
    command = words if len(words) > 1 else [sys.executable, "-c", *words]
    return ServerProcess(command, os.environ, folder, folder / "server.log")


def wait_for(what: Callable[[], bool], seconds: float = 15.0) -> bool:
    deadline = time.monotonic() + seconds
    while not what():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def lost_of(process: ServerProcess, essential: str, seconds: float) -> tuple[str, str] | None:
    """The first process that is lost within so many seconds."""
    seen: list[tuple[str, str]] = []
    wait_for(lambda: bool(seen.extend(filter(None, [process.lost(essential)])) or seen), seconds)
    return next(iter(seen), None)


def pids(folder: Path) -> dict[str, int]:
    assert wait_for(lambda: all((folder / name).exists() for name in NAMES))
    return {name: int((folder / name).read_text()) for name in NAMES}


def alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def survivors(family: dict[str, int]) -> list[str]:
    return [name for name, pid in family.items() if alive(pid)]


def test_stop_ends_every_process_even_one_that_left_its_session(tmp_path: Path) -> None:
    process = launch(tmp_path, SERVER)
    family = pids(tmp_path)
    assert survivors(family) == list(NAMES)
    process.stop()
    assert survivors(family) == []
    process.stop()  # idempotent


def test_killing_the_parent_with_sigkill_leaves_no_process_and_no_scratch(tmp_path: Path) -> None:
    parent_code = (
        "import os, sys, time\nfrom pathlib import Path\nfrom assay.harness.engines.process import ServerProcess\n"
        "folder = Path(sys.argv[1])\n"
        "ServerProcess([sys.executable, '-c', sys.argv[2]], os.environ, folder, folder / 'server.log')\n"
        "time.sleep(600)\n"
    )
    scratch = tmp_path / "tmp"
    scratch.mkdir()
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(scratch)}
    parent = subprocess.Popen([sys.executable, "-c", parent_code, str(tmp_path), SERVER], env=environment)
    family = pids(tmp_path)
    guardian = psutil.Process(family["main"]).ppid()
    assert len(list(scratch.glob("assay-*"))) == 1
    parent.kill()
    parent.wait()
    assert wait_for(lambda: not alive(guardian)), "the guardian is still there"
    assert survivors(family) == []
    assert list(scratch.glob("assay-*")) == []


def test_killing_the_guardian_ends_the_server(tmp_path: Path) -> None:
    process = launch(tmp_path, SERVER)
    family = pids(tmp_path)
    os.kill(process.pid, signal.SIGKILL)
    try:
        assert wait_for(lambda: not alive(family["main"]))
    finally:
        process.stop()
        for pid in (family["scheduler"], family["escaped"]):  # real ones ask for a parent-death signal of their own
            os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize(
    ("whom", "number", "ended"), [("guardian", signal.SIGTERM, "exit"), ("main", signal.SIGSEGV, "was killed by SIGSEGV")]
)
def test_the_end_of_the_guardian_or_of_the_main_process_ends_all(tmp_path: Path, whom: str, number: int, ended: str) -> None:
    process = launch(tmp_path, SERVER)
    family = pids(tmp_path)
    os.kill({"guardian": process.pid, **family}[whom], number)
    assert wait_for(lambda: process.exit_status is not None)
    assert process.how_it_ended.startswith(ended)
    assert survivors(family) == []


@pytest.mark.parametrize(
    ("script", "ended"),
    [
        ("exit 3", "exited with status 3"),
        ("kill -KILL $$", "was killed by SIGKILL"),
        ("kill -ABRT $$", "was killed by SIGABRT"),
        ("kill -PIPE $$", "was killed by SIGPIPE"),  # Python ignores it, and an ignored signal stays ignored
    ],
)
def test_the_exit_of_the_command_is_passed_on(tmp_path: Path, script: str, ended: str) -> None:
    process = launch(tmp_path, "/bin/sh", "-c", script)
    assert wait_for(lambda: process.exit_status is not None)
    assert process.how_it_ended == ended


def test_a_command_that_cannot_be_run_is_reported(tmp_path: Path) -> None:
    process = launch(tmp_path, str(tmp_path / "nothing"), "")
    assert wait_for(lambda: process.exit_status is not None)
    assert process.how_it_ended == "exited with status 127"
    assert "nothing cannot be run" in process.log_tail()


SHARING = """
import mmap, os, sys, time
for path in sys.argv[1:]:
    with open(path, "wb+") as file:
        file.truncate(4096)
        kept = globals().setdefault("maps", [])
        kept.append(mmap.mmap(file.fileno(), 4096))
open("ready", "w").close()
time.sleep(600)
"""


@pytest.mark.parametrize("ending", ["stop", "killed"])
def test_shared_memory_that_the_server_leaves_is_removed(tmp_path: Path, ending: str) -> None:
    names = [f"{kind}assay-test-{os.getpid()}-{ending}" for kind in ("sem.mp-", "sglang_loads_", "psm_", "somebodys-")]
    files = [Path("/dev/shm") / name for name in names]
    process = launch(tmp_path, sys.executable, "-c", SHARING, *map(str, files))
    try:
        assert wait_for((tmp_path / "ready").exists)
        (server,) = psutil.Process(process.pid).children()
        assert wait_for(lambda: _shared_files(server.pid) == set(map(str, files[:3])))
        if ending == "killed":
            time.sleep(5 * LOOK_AGAIN_S)
            server.kill()
        else:
            process.stop()
        assert wait_for(lambda: process.exit_status is not None)
        assert [file.exists() for file in files] == [False, False, False, True], "what may belong to others stays"
    finally:
        process.stop()
        for file in files:
            file.unlink(missing_ok=True)


@pytest.mark.parametrize(
    ("script", "what"), [("sleep 2; exit 7", "exited with status 7"), ("sleep 2; kill -SEGV $$", "was killed by SIGSEGV")]
)
def test_an_essential_process_that_ended_is_named_with_how_it_ended(tmp_path: Path, script: str, what: str) -> None:
    code = (
        "import subprocess, time\n"
        f"subprocess.Popen(['sh', '-c', '{script}'])\n"
        "subprocess.Popen(['sleep', '600'])\nsubprocess.Popen(['true'])\ntime.sleep(600)"
    )
    process = launch(tmp_path, code)
    try:
        name, how = lost_of(process, "sh -c sleep 2", 10) or ("", "")
        assert (name[:14], how) == ("sh -c sleep 2;", what)
    finally:
        process.stop()


SPAWNS = """
import multiprocessing, os, sys, time
def fail(status):
    time.sleep(2)
    os._exit(status)
if __name__ == "__main__":
    multiprocessing.set_start_method("spawn")
    multiprocessing.Process(target=fail, args=(int(sys.argv[1]),)).start()
    time.sleep(600)
"""


@pytest.mark.parametrize(("status", "noticed"), [(7, True), (0, False)])
def test_a_process_that_failed_before_it_had_a_name_is_noticed(tmp_path: Path, status: int, noticed: bool) -> None:
    (tmp_path / "spawns.py").write_text(SPAWNS)
    process = launch(tmp_path, sys.executable, str(tmp_path / "spawns.py"), str(status))
    try:
        lost = lost_of(process, "sglang::", 7)
        assert lost is not None and lost[1] == "exited with status 7" if noticed else lost is None
    finally:
        process.stop()


FORKS = """
import os, signal, sys, time
if sys.argv[1] == "server":
    os.spawnv(os.P_NOWAIT, sys.executable, ["sglang::scheduler", __file__, "scheduler"])
else:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # so that a child that has ended is gone
    if os.fork() == 0:
        time.sleep(2)
        os.execvp("sleep", ["sleep", "1"])
time.sleep(600)
"""


def test_a_command_that_a_process_runs_is_not_taken_for_one_that_ended(tmp_path: Path) -> None:
    (tmp_path / "forks.py").write_text(FORKS)
    process = launch(tmp_path, sys.executable, str(tmp_path / "forks.py"), "server")
    try:
        assert lost_of(process, "sglang::", 7) is None, "until it is lscpu, it has the scheduler's name"
    finally:
        process.stop()
