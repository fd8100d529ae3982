"""Stands in for the command ``assay`` in the cells of a sweep: its last word before the flags of its place says what it does."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

words = sys.argv[1:]
does, _, argument = words[1].partition("=")
out = Path(words[words.index("--out") + 1]) if "--out" in words else None


def end(verdict: str, code: int) -> None:
    print(json.dumps({"verdict": verdict, "headline": f"it is a {verdict}"}))
    sys.exit(code)


print("working", file=sys.stderr, flush=True)
match does:
    case "pass" | "regression" | "inconclusive":
        end(does, {"pass": 0, "regression": 1, "inconclusive": 3}[does])
    case "claims":  # its exit code says one thing, its result another
        end(argument, 0)
    case "says-nothing":
        sys.exit(0)
    case "misused":
        print("There is no such thing.", file=sys.stderr)
        sys.exit(2)
    case "killed":
        os.kill(os.getpid(), 9)
    case "sleeps":
        time.sleep(float(argument))
        end("pass", 0)
    case "forks":  # and what it forks leaves its session, and closes everything
        command = [sys.executable, "-c", f"import time; time.sleep(600)  # {argument}"]
        for _ in range(20):
            subprocess.Popen(command, start_new_session=True, stdin=-3, stdout=-3, stderr=-3)
        print("forked", file=sys.stderr, flush=True)
        time.sleep(600)
    case "eats":
        memory = [b"x" * 10**7 for _ in range(int(argument))]
        time.sleep(600)
    case "writes":
        for number in range(10_000):
            Path(os.environ["TMPDIR"], f"{number}").write_bytes(b"x" * 10**6)
            time.sleep(0.002)
    case "writes-one":
        with Path(argument).open("wb") as file:
            file.write(b"x" * 10**8)
    case "counts":  # goes on where it was, one number a moment
        assert out is not None
        out.mkdir(exist_ok=True)
        for number in range(int(argument)):
            if not (out / f"{number}.json").exists():
                (out / f"{number}.json").write_text(str(os.getpid()))
                time.sleep(0.2)
        end("pass", 0)
    case _:
        sys.exit(f"unknown: {does}")
