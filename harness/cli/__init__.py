"""The command ``assay``: parse, call, exit. One module for each group of commands."""

from harness.cli import run  # noqa: I001 - the order of the imports is that of the commands in --help
from harness.cli import look
from harness.cli import check
from harness.cli import bench
from harness.cli import bisect
from harness.cli import bisect_commits
from harness.cli import gate
from harness.cli.app import app, main

__all__ = ["app", "bench", "bisect", "bisect_commits", "check", "gate", "look", "main", "run"]
