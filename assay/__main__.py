"""``python -m assay`` is the command ``assay``."""

from assay.harness.cli.app import entry

entry()
