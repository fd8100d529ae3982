"""``python -m assay`` is the command ``assay``."""

from assay.harness.cli.supervised import main

main()
