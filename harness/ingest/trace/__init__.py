"""Traces of engines and profilers: read, checked by a state machine, and compared."""

from assay.harness.ingest.trace.chrome import ChromeReader
from assay.harness.ingest.trace.mlc import MlcReader

READERS = (MlcReader(), ChromeReader())
