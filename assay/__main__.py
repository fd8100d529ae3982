"""``python -m assay`` is the command ``assay``."""

from assay.harness.cli import main

main()
