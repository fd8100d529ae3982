"""Sentences about servers: whether they differed only in the treatment, and whose kernels ran in them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from assay.harness.evidence.run_file import RUN_AGAIN
from assay.harness.judge.report import CallSummary, PassKernels
from assay.harness.statement import Statement
from assay.harness.text import counted, few, listed, percent
from assay.reports.wording.say import Found, Templates, found_in, say, says


@says
def _others_called(phase: str, kernel: str, calls: int, others: list[tuple[str, int]]) -> Found:
    also = ", ".join(f"{other} {counted(count, 'call')}" for other, count in others)
    return Found(f"{kernel} {counted(calls, 'call')}, but also {also}", f"run so that nothing else computes {phase}")


@says
def _layers_lacking(kernel: str, ran: int, layers: int, lacking: list[int]) -> Found:
    return Found(
        f"{kernel} ran in {ran} of {counted(layers, 'layer')}; not in {lacking[:8]}",
        "run so that it computes every layer",
    )


@says
def _decode_calls(shares: list[tuple[str, int, int]], least: float) -> Found:
    compiled = ", ".join(f"{calls:,} of {of:,} decode calls of the {role}" for role, calls, of in shares)
    return Found(
        f"{compiled}; more than {percent(least)} of each are needed",
        "leave --enable-torch-compile out, or capture graphs for batches this large (not with a kernel of the contract for decode)",
    )


_Ran = list[tuple[str, int]]
_FIND_OUT = "find out what the kernel computes instead, or declare what it launches"


@says
def _kernels_not_named(noise: str, package: str, ran: _Ran) -> Found:
    claims = [f"the quantisation {noise}"] if noise else []
    claims += [f"the package {package}"] if package else []
    lacks = (
        f"it declares {' and '.join(claims)}, but no names of kernels that would prove it"
        if claims
        else "it declares no names of kernels"
    )
    return Found(f"{lacks}; {_kernels_ran(ran)}", "name what it launches with declares(kernels=...)")


@says
def _reference_kernels_ran(phase: str, backend: str, names: list[str]) -> Found:
    said = f"the reference's kernels ran in the candidate's server: {_some_kernels(names)}"
    return Found(said, f"run so that only {backend} computes {phase}")


@says
def _known_names_lacking(backend: str, ran: _Ran) -> Found:
    return Found(
        f"none of the kernels known for the engine's {backend} ran under its known names; {_kernels_ran(ran)}",
        "compare the names in the report with what the engine launches",
    )


@says
def _own_kernels_lacking(names: list[str], phase: str, cached_prefix: bool, ran: _Ran) -> Found:
    where = _pass_title(phase, cached_prefix)
    return Found(f"none of {_some_kernels(names)} ran in {where}; {_kernels_ran(ran)}", _FIND_OUT)


@says
def _declared_never_ran(names: list[str], ran: _Ran) -> Found:
    return Found(f"declared, but did not run: {_some_kernels(names)}; {_kernels_ran(ran)}", _FIND_OUT)


@says
def _reference_ran_candidates(names: list[str]) -> Found:
    said = f"the reference ran the candidate's kernels: {_some_kernels(names)}"
    return Found(said, "compare it with a reference that does not launch the same kernels")


@says
def _kernels_ran(ran: _Ran) -> str:
    return f"ran: {_some_kernels(f'{name} ({launches})' for name, launches in ran)}" if ran else "nothing ran"


def _some_kernels(names: Iterable[str]) -> str:
    """Name the first four kernels, each cut after 80 characters: names of C++ templates fill whole pages."""
    return few([name if len(name) <= 80 else f"{name[:80]}…" for name in names], 4)


def _pass_title(phase: str, cached_prefix: bool) -> str:
    """Describe a traced pass: "extend with a cached prefix"; decode always has one."""
    return phase if phase == "decode" else f"{phase} {'with' if cached_prefix else 'without'} a cached prefix"


@says
def _other_backend_ran(other: list[tuple[str, str, str]]) -> Found:
    said = (f"the {role} was asked to run {asked}, but its server ran {ran}" for role, asked, ran in other)
    return Found("; ".join(said), RUN_AGAIN)


@says
def _arguments_differ(arguments: list[tuple[str, str, str]], asked: list[str]) -> Found:
    differ = "; ".join(f"{name}: {ours} against {theirs}" for name, ours, theirs in arguments)
    return Found(differ, f"run again so that only {listed(asked) or 'nothing'} differs")


@says
def _servers_agree(
    stored: bool, arguments: int, parts: int | None, derived: Sequence[str] = (), unknown: Sequence[tuple[str, Sequence[str]]] = (),
    lost: Sequence[str] = (),
) -> str:  # fmt: skip
    same = "the stored reference and the candidate have the same model hash" if stored else "one model folder"
    served = "was not observed" if parts is None else f"agrees in {counted(parts, 'part')}"
    follow = f", and {counted(len(derived), 'other')} follow from the treatment ({few(derived, 3)})" if derived else ""
    lacks = "".join(f"; the {role} has no {few(names, 3)}" for role, names in unknown)
    apart = f"; {listed(lost)} not compared, as one of them does not report it" if lost else ""
    return f"{same}; {arguments - len(derived)} server arguments agree{follow}{lacks}; what they served {served}{apart}"


@says
def _with_common_settings(outcome: Statement, because: list[str], impossible: list[str]) -> Found:
    said = found_in(outcome)
    unequal = (f"not made equal: {setting}" for setting in impossible)
    return said._replace(found="; ".join([said.found, *because, *unequal]))


@says
def _no_request_admitted(roles: list[str], url: bool = True) -> Found:
    said = f"no admitted request was recorded in the server of the {' or the '.join(roles)}"
    return Found(said, "let assay start both servers" if url else "see the servers' logs, and run again")


@says
def _calls_disagree(first: list[tuple[str, Statement]], more: int) -> Found:
    said = "; ".join(f"{role}: {say(disagreement)}" for role, disagreement in first)
    return Found(f"{said}; and {more} more" if more else said, RUN_AGAIN)


@says
def _calls_agree(passes: list[int], requests: list[int]) -> str:
    counts = (" and ".join(f"{number:,}" for number in numbers) for numbers in (passes, requests))
    return "{} prefill passes in every layer, {} answered requests".format(*counts)


def counted_calls(call: CallSummary) -> str:
    """Say how often a kernel was called in a phase: "decode: torch_native 1,020 calls, delegated"."""
    kinds = {"in CUDA graphs": call.calls_in_graphs, "compiled": call.calls_compiled}
    delegated = ", delegated" if call.delegated_by else ""
    ways = "".join(f", {calls:,} of them {kind}" for kind, calls in kinds.items() if calls)
    return f"{call.phase}: {call.kernel} {counted(call.calls, 'call')}{delegated}{ways}"


def traced_kernels(traced: PassKernels) -> str:
    """Say what ran in a pass: "candidate, extend without a cached prefix: _attn_fwd (4), quant_per_block_int8_kernel (8)"."""
    own = [kernel for kernel in traced.kernels if kernel.of and kernel.attention is not False]
    others = len(traced.kernels) - len(own)
    named = _some_kernels(f"{kernel.name} ({kernel.launches})" for kernel in own) or "none with a known name"
    rest = f"; {others} others" if others else ""
    return f"{traced.role}, {_pass_title(traced.phase, traced.cached_prefix)}: {named}{rest}"


@says
def _accuracy_warned(line: str, more: int) -> str:
    return f"{line} ({counted(more, 'further warning')})" if more else line


SENTENCES: Templates = {
    "candidate-never-started": Found(
        "the record of its server is missing",
        "start it, or restore the files of the run; candidate.log says why one did not start",
    ),
    "not-instrumented": Found(
        "{backend} is a server that assay did not start and cannot instrument",
        "let assay start the candidate, by its backend's name",
    ),
    "no-call-counted": Found(
        "no {phase} call of {backend} was counted",
        "run so that {backend} computes {phase}; see candidate.log for what ran instead",
    ),
    "own-kernel-called": "{kernel} {calls:counted call} in {layers:counted layer}",
    "not-both-started": Found(
        "a record of the servers is missing",
        "start both, or restore the files of the run; see the servers' logs",
    ),
    "not-started-by-assay": Found("at least one server was not started by assay", "let assay start both servers"),
    "one-server": Found("{url} is the server of both", "name another one as the candidate"),
    "arguments-not-reported": Found("neither server reported its arguments", "use an engine that reports them"),
    "settings-not-compared": Found(
        "settings of the model were not compared ({why})",
        "remove the cause that kept the server from reading them",
    ),
    "prefill-in-graphs": "prefill ran in CUDA graphs, whose batches cannot be recorded",
    "requests-not-admitted": "{count:,} of {answers:,} answered requests were not admitted, the first {first}",
    "other-prefixes-reported": "{count:,} of {answers:counted answer} report another cached prefix than their request had",
    "too-few-decode-calls": "layer {layer}: {calls:,} decode calls, but the answers' {tokens:,} further tokens "
    "took at least {needed:,}",
    "no-pass-traced": Found(
        "no {phase} pass{of_reference:if  of the reference|} was traced", "run again, so that each server traces a pass"
    ),
    "flags-ignored": Found(
        "both servers report the same {flags:listed}, which should differ", "see why the engine ignores the flag"
    ),
    "served-otherwise": Found(
        "of what they served (A the reference, B the candidate), {said:parts}",
        "run again so that the servers differ only as intended; see assay compare of both",
    ),
    "prefill-calls": "layer {layer}{cached_prefix:if  with a cached prefix|}: {calls:counted call} in {passes:,} passes",
    "answers-parsed": Found(
        "{otherwise:if {otherwise:,} of {answers:,} answers were recorded with another letter than their text gives"
        "|{answers:,} of {answers:,} letters match the texts}",
        f"{RUN_AGAIN}: records.jsonl was changed, or another version of assay wrote it",
    ),
}
