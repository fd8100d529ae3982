"""The command ``assay``: parse, call, exit. One module for each group of commands."""

from harness.cli import run  # noqa: I001 - the order of the imports is that of the commands in --help
from harness.cli import look
from harness.cli.app import app, main

__all__ = ["app", "look", "main", "run"]
