from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from assay.harness.attention.bugs.faults import rounded_oracle
from assay.harness.attention.call import AttentionCall
from assay.harness.attention.honest import honest_outputs
from assay.harness.attention.noise import family
from assay.harness.attention.sample_calls import call_of
from assay.harness.engines.inside.reduction import LayerSums
from assay.harness.engines.inside.truth_sums import TruthSums, sampled_rows
from assay.harness.evidence.error_table import DIMENSIONS, QUERY, ErrorTable, RoleErrors, condition_numbers, excess, joined
from assay.harness.evidence.shadow_errors import ShadowErrors, ShadowHeader
from assay.harness.judge.truth_bounds import AgainstNoise, compare_with_noise

HEADS, NEW, PREFIX = 2, 2048, 64
CALL = call_of([(NEW, PREFIX)], (HEADS, 1), 16, torch.bfloat16, "cpu", seed=7)
CONDITIONS = condition_numbers("extend", [NEW], [PREFIX])


def compared(
    call: AttentionCall, candidate: Tensor, reference: Tensor, noise: str = "", missed: Sequence[int] = ()
) -> tuple[AgainstNoise, ErrorTable]:
    """What the shadow makes of one call, if the sample misses some queries."""
    heads = LayerSums(HEADS, torch.device("cpu"))
    worst = [int(at) // HEADS for _, at in heads.measure(candidate, reference, torch.from_numpy(CONDITIONS))]
    rows = np.setdiff1d(sampled_rows([NEW], [PREFIX], np.random.default_rng(1)), missed)
    sums = TruthSums(HEADS, noise, "")
    sums.add(call, (candidate, reference), rows, CONDITIONS, 0, worst)
    header = ShadowHeader(
        reference="r", candidate="c", phases=("extend",), candidate_noise=noise, dtype=sums.dtype, accumulation=sums.accumulation
    )
    table = joined([heads.cells(0, 0), sums.cells(0, 0)])
    return compare_with_noise(ShadowErrors(table, (header,))), table


@pytest.mark.parametrize(("rows", "heads"), [([701, 1302, 2000], slice(None)), ([1302], slice(1, 2))])
def test_single_wrong_queries_do_not_drown_in_their_cells(rows: list[int], heads: slice) -> None:
    right = rounded_oracle(CALL)
    wrong = right.clone()
    wrong[rows, heads] = 0
    against, table = compared(CALL, wrong, right, missed=rows)
    assert not against.cells.flagged.any()
    assert not against.gains.flagged.any()
    flagged = table.candidate.worst[excess(table.candidate.worst) > 1]
    assert set(flagged[:, QUERY.index("position")] - PREFIX) <= set(rows)
    assert set(flagged[:, QUERY.index("prefix")]) == {PREFIX}
    assert 1 in against.queries.index[against.queries.flagged][:, DIMENSIONS.index("head")]
    assert not against.reference_queries.flagged.any()


@pytest.mark.few(2)
@pytest.mark.parametrize("noise", ["", "int8_qk", "fp8_kv"])
def test_honest_queries_are_within_their_bounds(noise: str) -> None:
    candidate = honest_outputs(CALL, family(noise), members=2, seed=11)[0].to(CALL.q.dtype)
    against, _ = compared(CALL, candidate, rounded_oracle(CALL), noise)
    assert float(against.queries.excess.max()) < 0.6
    assert not against.reference_queries.flagged.any()


def test_of_several_processes_the_worse_query_stays() -> None:
    index = np.array([[0, 0, 0, 0, 0, 0], [0, -1, 0, 0, 0, 0]])
    mild, bad = (np.array([[off, 1.0, 4.0, at, 0.0]] * 2) for off, at in ((0.5, 3.0), (3.0, 9.0)))
    mild, bad = (replace(RoleErrors.none(2), worst=worst) for worst in (mild, bad))
    found = joined([ErrorTable.of(index, None, mild, bad), ErrorTable.of(index, None, bad, mild)])
    assert len(found.index) == 2
    assert set(excess(found.candidate.worst)) == set(excess(found.reference.worst)) == {3.0}
    assert set(found.candidate.worst[:, QUERY.index("position")]) == {9.0}
