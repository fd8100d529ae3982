"""The kernels that run inside of real CPU servers: one whose kernel does what it declares, and one that answers with PyTorch's."""

from __future__ import annotations

import pytest
from rich.console import Console

from assay.harness.config import RunSpec
from assay.harness.evidence.executed import KERNEL_TRACES, passes_of
from assay.harness.evidence.folder import RunFolder
from assay.harness.judge.executed_kernels import _check_kernels_executed
from assay.harness.progress import ProgressDisplay
from assay.harness.run.collect import _Asking, _kernels
from assay.harness.run.plan import Plan, prepare
from assay.harness.run.questions import QuestionStop
from assay.harness.run.run_folder import open_folder
from assay.harness.run.servers import make_run_engine, manifest_of, running
from assay.harness.sides import ROLES, Role
from assay.reports.wording.requirements import said_check

pytestmark = [pytest.mark.server, pytest.mark.slow, pytest.mark.interpreter]
SILENT = """
from assay.harness.attention.declaration import declares
from assay.harness.attention.sdpa import torch_sdpa

@declares(phases=("extend",), noise="int8_qk", kernels=("_attn_fwd",))
def int8(call):
    return torch_sdpa(call)
"""


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> tuple[Plan, RunFolder]:
    """A run whose reference is SageAttention, as it is, and whose candidate only claims to be."""
    place = tmp_path_factory.mktemp("kernels")
    (place / "silent.py").write_text(SILENT)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(place))
        patch.setenv("PYTHONPATH", str(place))
        suites = ("accuracy",)
        plan = prepare(RunSpec.of(reference="sage_attn", candidate="silent:int8", questions=4, suites=suites))
        folder = open_folder(plan, place / "run")
        engines = [make_run_engine(plan, folder, role) for role in ROLES]
        with running(engines, "cpu"):
            for engine in engines:
                folder.record_server(manifest_of(engine))
                list_kernels = _kernels(asked(plan, folder), engine.role)
                assert list_kernels is not None
                list_kernels(engine)
    return plan, folder


def asked(plan: Plan, folder: RunFolder) -> _Asking:
    display = ProgressDisplay(Console(quiet=True))
    return _Asking(plan, folder, display, QuestionStop(plan, [], together=True), set())


def names(folder: RunFolder, role: Role, phase: str, cached: bool) -> set[str]:
    passes = passes_of(KERNEL_TRACES.read_each(folder.server_folder(role), folder.nonce).values(), phase)
    return {kernel.name for one in passes if one.cached_prefix is cached for kernel in one.kernels}


@pytest.mark.parametrize("cached", [False, True])
def test_what_ran_is_listed_by_phase_and_cached_prefix(traced: tuple[Plan, RunFolder], cached: bool) -> None:
    _, folder = traced
    assert {"_attn_fwd", "quant_per_block_int8_kernel"} <= names(folder, "reference", "extend", cached)
    silent = names(folder, "candidate", "extend", cached)
    assert "aten::scaled_dot_product_attention" in silent
    assert "_attn_fwd" not in silent
    assert not any(_kernels(asked(traced[0], folder), role) for role in ROLES)


def test_decode_is_traced_too(traced: tuple[Plan, RunFolder]) -> None:
    _, folder = traced
    for role in ROLES:
        assert "aten::scaled_dot_product_attention" in names(folder, role, "decode", True)


def test_a_kernel_that_declares_int8_and_answers_with_pytorchs_attention_is_caught(traced: tuple[Plan, RunFolder]) -> None:
    _, folder = traced
    servers = {server.role: server for server in folder.progress().servers}
    traces = {role: list(KERNEL_TRACES.read_each(folder.server_folder(role), folder.nonce).values()) for role in ROLES}
    (check,) = _check_kernels_executed(servers["candidate"], traces)
    assert check.status == "failed"
    assert "scaled_dot_product" in said_check(check).found
    honest = servers["reference"].model_copy(update={"role": "candidate"})
    (check,) = _check_kernels_executed(honest, {"candidate": traces["reference"], "reference": []}, stored=True)
    assert (check.status, check.outcome.id) == ("ok", "kernels-ran")
