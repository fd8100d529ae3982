"""Results that other tools wrote, and assay's own, in one form (`result_set.ResultSet`), and the comparison of two."""

from assay.harness.ingest.results.assay_run import AssayRun
from assay.harness.ingest.results.inspect_ai import InspectAi
from assay.harness.ingest.results.junit import JUnit
from assay.harness.ingest.results.lm_eval import LmEval
from assay.harness.ingest.results.serving import Serving
from assay.harness.ingest.results.sgl_eval import SglEval
from assay.harness.ingest.results.simple_evals import SimpleEvals

READERS = (AssayRun(), LmEval(), SglEval(), InspectAi(), SimpleEvals(), Serving(), JUnit())
"""All readers of results, in the order in which they are tried."""
