"""The command ``assay``: parse, call, render, exit. One module for each group of commands."""

from assay.harness.cli.app import app, main

__all__ = ["app", "main"]
