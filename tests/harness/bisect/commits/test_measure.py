from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest

from assay.harness.bisect.commits.measure import reproduce
from assay.harness.bisect.commits.state import BisectSpec
from assay.harness.cli.app import load_command

SETTINGS: dict[str, Any] = {
    "repo": "/r", "good": "g" * 40, "bad": "b" * 40, "kernel": "m:f", "build": "make all", "sources": ("lib", "src"),
    "first_parent": True, "pack": "/p", "conditions": ("phase=extend", "prefix=1"), "calls": 6, "seed": 5, "raises": "bad",
    "repeats": 2, "confidence": 0.9, "scan": 1, "keep_build": True, "timeout": 9.0, "build_timeout": 8.0,
}  # fmt: skip


@pytest.mark.parametrize(
    "more",
    [{"against": "good", "times": 3.0}, {"measure_with": "accuracy", "run_args": ("--questions=8",), "scan": 8, "timeout": 300.0}],
)
def test_the_command_repeats_every_setting(more: dict[str, Any], tmp_path: Path) -> None:
    more = {**more, "repo": str(tmp_path)}  # the command refuses one that is not there
    spec = BisectSpec(**{**SETTINGS, **more})
    command = load_command("bisect").commands["commits"]
    parsed = command.make_context("commits", shlex.split(reproduce(spec, "c" * 40))[3:]).params
    for name, value in {**SETTINGS, **more, "good": "g" * 12, "bad": "c" * 12}.items():
        found = parsed[name]
        assert (tuple(found) if isinstance(value, tuple) else type(value)(found)) == value, name


def test_the_command_leaves_out_what_is_the_default() -> None:
    spec = BisectSpec(repo="/r", good="g", bad="b", kernel="m:f")
    assert reproduce(spec, "c") == "assay bisect commits --repo=/r --good=g --bad=c --kernel=m:f"
