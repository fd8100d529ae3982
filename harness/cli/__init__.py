"""The command ``assay``: parse, call, exit. One module for each group of commands."""

from assay.harness.cli import run  # noqa: I001 - the order of the imports is that of the commands in --help
from assay.harness.cli import diff
from assay.harness.cli import check
from assay.harness.cli import bench
from assay.harness.cli import bisect
from assay.harness.cli import bisect_commits
from assay.harness.cli import gate
from assay.harness.cli.app import app, main

__all__ = ["app", "bench", "bisect", "bisect_commits", "check", "diff", "gate", "main", "run"]
