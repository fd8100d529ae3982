"""The output of `assay explain`: the page of a known bug or another finding, and the list of them."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from dataclasses import dataclass
from textwrap import indent

from assay.harness.attention.bugs.bug import Bug, Form, links
from assay.harness.attention.bugs.family import BY_ID, FAMILY, KIND_TITLES, public_reports
from assay.harness.attention.bugs.lse import BUGS as LSE_BUGS
from assay.harness.localize.causes import OUTPUT_NOT_WRITTEN, OUTPUT_SCALED
from assay.harness.localize.diagnose import CALL_REFUSED, INPUT_WRITTEN, NONDETERMINISM, STATE_KEPT, TITLES
from assay.harness.localize.lse import LSE_WRONG
from assay.harness.localize.pooled import QUANTISATION_NOT_RUN
from assay.harness.verdict import CONTRACT_BROKEN, OPERATOR, UNEXPLAINED

_MARK = "  # <--"
_FORM_WORDS: dict[Form, str] = {
    "sequence": "One sequence: q is [heads, new, dim]; k and v are [heads, cached + new, dim].",
    "heads": "One sequence: q is [heads, new, dim]; k and v are [kv heads, cached + new, dim].",
    "batch": "Sequence b of a batch: q is [heads, new, dim]; k and v are those of the whole batch, [heads, tokens, dim].",
}
# First words that keep their case.
_SYMBOLS = ("q", "int8")


_RIGHT_LSE = "Return the natural logarithm of the sum of exponentials of scaled scores, float32 [total_q, num_q_heads]."


@dataclass(frozen=True)
class _Advice:
    """The advice on a finding that is not a bug of the family."""

    id: str
    title: str
    about: str
    do: str
    reports: tuple[str, ...] = ()


_FINDINGS = (
    _Advice(
        UNEXPLAINED,
        TITLES[UNEXPLAINED],
        "An output is out of its bound, and no known bug explains it to within rounding. Several bugs at once also look like this.",
        "Read the line that begins with \"observed\", if any. Look at the axes: which values of which axis fail? Run the "
        "test of the smallest failing call in a debugger.",
    ),
    _Advice(
        OPERATOR,
        "another operator",
        "assay probed what the kernel computes, and the answer is exact: it is neither attention nor a known bug. The finding's "
        "sentence states what it is instead, and its picture shows it on the smallest telling call.",
        "Compare the sentence with what the kernel is meant to compute. If they agree, this is no attention backend for the model.",
    ),
    _Advice(
        NONDETERMINISM,
        TITLES[NONDETERMINISM],
        "The same call, run twice in a row, gives different outputs. Atomics that add in another order differ by rounding, which "
        "is reported for information only. A larger difference is a race: missing synchronisation, or uninitialised memory.",
        "If it is serious, look for a missing barrier, for shared memory that is read too early, and for torch.empty.",
    ),
    _Advice(
        STATE_KEPT,
        TITLES[STATE_KEPT],
        "The same call gives another output after other calls. The kernel keeps state between calls: a plan, a workspace, or "
        "a result that is looked up by shape.",
        "Make the cache key include everything that the state depends on, or rebuild the state for each batch.",
    ),
    _Advice(
        LSE_WRONG,
        TITLES[LSE_WRONG],
        "The kernel declares that it returns log-sum-exps, and at least one of them is further off than rounding explains. "
        "Log-sum-exps weight the outputs when parts of the keys are merged, so a wrong one gives a part the wrong weight.",
        _RIGHT_LSE,
    ),
    *(
        _Advice(bug.id, bug.title, f"{bug.about[0].upper()}{bug.about[1:]}.", _RIGHT_LSE, links(*bug.reports))
        for bug in LSE_BUGS
    ),
    _Advice(
        INPUT_WRITTEN,
        TITLES[INPUT_WRITTEN],
        "The kernel writes to q, k, v or the sequence lengths. An engine uses these tensors again: K and V are the cache.",
        "Work on a copy, for example where the softmax scale is multiplied into q.",
    ),
    _Advice(
        CALL_REFUSED,
        TITLES[CALL_REFUSED],
        "The kernel raised KernelRefused. That does not break the contract, but a verdict does not cover the refused calls.",
        "Declare what the kernel supports, for example @declares(head_dims=(64, 128)), so that reports can state it.",
    ),
    _Advice(
        CONTRACT_BROKEN,
        "kernel contract broken",
        "The kernel raised an exception, returned something other than [total_q, num_q_heads, head_dim_v] in the dtype and on "
        "the device of q, or returned the memory of an earlier output, which its caller may still hold.",
        "Fix it at the line that the finding names, or raise KernelRefused for calls that the kernel does not support.",
    ),
    _Advice(
        OUTPUT_SCALED,
        TITLES[OUTPUT_SCALED],
        "Every output is a multiple of what it should be. The slope of the output on the truth over many calls shows factors that "
        "rounding would hide in a single call.",
        "Look at the denominator of the softmax, and at the scale of a quantised V.",
    ),
    _Advice(
        OUTPUT_NOT_WRITTEN,
        TITLES[OUTPUT_NOT_WRITTEN],
        "The output is zero where it should not be: most kernels that do this return before they store, or store elsewhere.",
        "Look at the early exits of a program, at the launch grid, and at the mask of the store.",
    ),
    _Advice(
        QUANTISATION_NOT_RUN,
        TITLES[QUANTISATION_NOT_RUN],
        "The kernel declares a quantisation, and its error is smaller than any such kernel can have. Another kernel probably "
        "ran, such as a fallback in full precision.",
        "Look for a fallback. If the kernel quantises less than it declares, correct its declaration.",
    ),
    _Advice(
        "own-error-out-of-bounds",
        "error beyond rounding",
        "In a server, on the inputs of real requests, the candidate's error is larger than rounding explains, in these layers, "
        "heads and conditions. No recorded call identified the bug.",
        "Record calls of that condition and replay them: assay run --record, then assay replay.",
    ),
    _Advice(
        "gain",
        "output scaled",
        "In a server, the candidate's output is a multiple of the truth, by more than rounding explains: a slope over all calls.",
        "Look at the denominator of the softmax, and at the scale of a quantised V.",
    ),
    _Advice(
        "noise-missing",
        "error smaller than the declared quantisation must cost",
        "In a server, the candidate's error is smaller than any kernel with its declared quantisation can have.",
        "Look for a fallback in full precision; see which kernels were traced.",
    ),
    _Advice(
        "reference-wrong",
        "the reference is wrong, so it proves nothing about the candidate",
        "The reference's own error against attention in float64 is out of its bounds.",
        "Choose another reference with --reference, such as torch_native.",
    ),
    _Advice(
        "reference-erratic",
        "erratic reference",
        "The reference was asked some prompts twice, and its log-odds changed by more than rounding explains. "
        "Its evidence about the candidate is then in doubt: such a run cannot pass.",
        "Find out what makes the reference differ from run to run: batching, another load on the machine, or a race in its kernel.",
    ),
    _Advice(
        "accuracy-warned",
        "engine warns about its accuracy",
        "A server's log has a warning of the engine about its own accuracy, such as an FP8 KV cache without scales. If both sides "
        "have the same setting, comparing them does not show what it costs.",
        "Repair the setting that the line names, or compare a side without it with one that has it.",
    ),
    _Advice(
        "accuracy",
        "loss of accuracy",
        "The candidate answers fewer questions right than the reference, by more than the margin. The finding names the condition "
        "that separates right from wrong answers, if any.",
        "Find the layer and the bug that cause it with assay run --suites layers; the suite \"layers\" of a run does the same.",
    ),
    _Advice(
        "layers-need-reference",
        "layers that must run the reference",
        "With the candidate in these layers, answers or texts are wrong; with the reference in them, they are right again.",
        "Replay recorded calls of these layers: assay run --record, then assay replay.",
    ),
    _Advice(
        "differences-break-candidate",
        "differences that break the candidate",
        "With these differences the reference is broken as the candidate is; without any one of them it is right.",
        "Repeat the run that the finding gives: it compares the reference with itself and these differences.",
    ),
    _Advice(
        "latency",
        "slower than the bound allows",
        "The ratio of the candidate's time to the reference's is above the bound, and the reference itself differs by less.",
        "See in which shapes and at which concurrency, and time the kernel alone, for example with triton.testing.do_bench.",
    ),
    _Advice(
        "answer-lengths",
        "answers differ in length",
        "The candidate's answers to the same prompts are shorter or longer than the reference's, or run to the token limit more "
        "often. Right answers that are 30 % longer cost 30 % more; timing complete answers measures that, not the kernel. "
        "In a run, a length ratio shown to be beyond length_bound is a regression; a bench times both at one forced length.",
        "Find out why the texts differ: the suites greedy and layers of a run.",
    ),
    _Advice(
        "feature-changes-output",
        "features that should not affect outputs change the output",
        "The same tokens were scored with some features of the engine on, such as the prefix cache and chunked prefill, and their "
        "log-probabilities differ from those without by more than rounding. The finding names the smallest set of features "
        "that causes this, the first position that shows it, and, where it was observed, the layer and the head at which the "
        "model's attention calls diverge: before attention, in the KV cache, in attention, or after it.",
        "Run the finding's command, which compares these features alone and together; then look at what the engine does at that "
        "position and in that place: page and chunk boundaries, what comes from the cache, and what is computed before it.",
    ),
)  # fmt: skip
_OTHERS = {finding.id: finding for finding in _FINDINGS}


def titles() -> dict[str, dict[str, str]]:
    """Return the title of every id that can be explained, by the heading of its kind; known bugs come first."""
    known = {
        heading: {bug.id: bug.title for bug in FAMILY if bug.kind == kind} for kind, heading in KIND_TITLES.items()
    }
    return known | {"Findings other than known bugs": {id: finding.title for id, finding in _OTHERS.items()}}


def explanation(id: str) -> str:
    """Describe a known bug or another finding, with wrong and right code, public reports and what to do.

    Raises:
        KeyError: nothing has this id.
    """
    return "\n\n".join(_of_bug(BY_ID[id]) if id in BY_ID else _of_finding(_OTHERS[id]))


def _of_bug(bug: Bug) -> Iterator[str]:
    first = bug.about.split()[0]
    about = bug.about if first in _SYMBOLS else bug.about[0].upper() + bug.about[1:]
    yield f"{bug.id}: {bug.title}"
    yield f"{about}."
    if bug.code is not None:
        yield _FORM_WORDS[bug.code.form]
        yield f"Wrong:\n{indent(_marked(bug.code.wrong, bug.code.right), '  ')}"
        yield f"Right:\n{indent(bug.code.right.rstrip(), '  ')}"
    yield _reported(public_reports(bug.id))
    if bug.measured:
        yield bug.measured
    with_what = "the right code" if bug.code is not None else "what the call asks for"
    yield f"What to do: Compare the kernel with {with_what}. After a fix, repeat the command that found the bug."


def _of_finding(finding: _Advice) -> Iterator[str]:
    yield f"{finding.id}: {finding.title}"
    yield finding.about
    if finding.reports:
        yield _reported(finding.reports)
    yield f"What to do: {finding.do}"


def _reported(addresses: tuple[str, ...]) -> str:
    return (
        "\n".join(["Public reports:", *(f"  {address}" for address in addresses)])
        if addresses
        else "No public report is known."
    )


def _marked(wrong: str, right: str) -> str:
    """Mark each line of wrong code that is not in the right code."""
    lines, others = wrong.rstrip("\n").split("\n"), right.rstrip("\n").split("\n")
    kept = {
        at for block in difflib.SequenceMatcher(None, lines, others, autojunk=False).get_matching_blocks()
        for at in range(block.a, block.a + block.size)
    }  # fmt: skip
    return "\n".join(line if at in kept else f"{line}{_MARK}" for at, line in enumerate(lines))
