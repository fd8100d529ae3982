"""Queries of a call: what is kept of them."""

from __future__ import annotations

import pickle

import numpy as np

from assay.harness.readout.probing import CallPlan
from assay.harness.readout.queries import Queries


def test_queries_can_be_sent_to_another_process_with_all_that_was_asked_of_them() -> None:
    """As a pytest of single cases does with what it has read."""
    call = CallPlan(((5, 4), (3, 0))).make("cpu")
    queries = Queries(call, [0, 2, 6])
    asked = {name: queries.pairs[name] for name in queries.pairs}
    assert asked
    sent = pickle.loads(pickle.dumps(queries))
    for name, values in asked.items():
        assert np.array_equal(sent.pairs[name], values), name
