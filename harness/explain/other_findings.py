"""Pages of findings that are no hypothesis: how a kernel behaves, what shows over many calls alone, what runs and benches find."""

from __future__ import annotations

from dataclasses import dataclass

from assay.harness.bugs.bug import Code, links
from assay.harness.bugs.lse import BUGS as LSE_BUGS
from assay.harness.localize.causes import OUTPUT_NOT_WRITTEN, OUTPUT_SCALED
from assay.harness.localize.diagnose import CALL_REFUSED, INPUT_WRITTEN, NONDETERMINISM, STATE_KEPT, TITLES
from assay.harness.localize.guard import CONTRACT_BROKEN
from assay.harness.localize.lse import LSE_WRONG
from assay.harness.localize.pooled import QUANTISATION_NOT_RUN
from assay.harness.picture import Picture
from assay.harness.verdict import OPERATOR, UNEXPLAINED, Severity

_CHECK, _RUN, _BENCH = (
    "assay check mine:forward",
    "assay run --candidate mine:forward",
    "assay bench --candidate mine:forward",
)
_DIFF, _BENCH_KERNEL = "assay diff --candidate mine:forward", "assay bench kernel PACK --candidate mine:forward"


OTHER_KIND = "other-findings"
"""The kind of every finding that is no hypothesis."""


@dataclass(frozen=True)
class Page:
    """All that assay knows about one id. The defaults are those of a finding that is no hypothesis.

    Attributes:
        id: of the hypothesis or finding.
        title: its name in prose.
        about: what goes wrong, in sentences.
        do: what to do about it.
        command: the command that shows it.
        severity: the highest of its finding.
        kind: id of a group of variants, or `OTHER_KIND`.
        variants: ids of the others of its kind.
        code: wrong and right code.
        picture: what the bug does to the weights of a small call.
        error: relative L1 by which it changes the output of that call; infinite if that is not finite.
        measured: what such a bug cost where it was measured; empty if it was not.
        reports: addresses of public reports of such a bug; empty if none is known.
    """

    id: str
    title: str
    about: str
    do: str
    command: str
    severity: Severity = "serious"
    kind: str = OTHER_KIND
    variants: tuple[str, ...] = ()
    code: Code | None = None
    picture: Picture | None = None
    error: float | None = None
    measured: str = ""
    reports: tuple[str, ...] = ()


_PAGES = (
    Page(
        UNEXPLAINED,
        TITLES[UNEXPLAINED],
        "An output is out of its bound, and no hypothesis fits it to within the noise. Several bugs at once also look like this.",
        "Read the line that begins with \"observed\", if there is one. Look at the axes: which values of which axis fail? Run the "
        "test of the smallest failing call in a debugger.",
        _CHECK,
    ),
    Page(
        OPERATOR,
        "another operator",
        "The kernel was asked what it computes, and the answer is exact: it is neither attention nor a known bug. The finding's "
        "sentence states what it is instead, and its picture shows it on the smallest telling call.",
        "Compare the sentence with what the kernel is meant to compute. If it is meant, it is no attention backend for this model.",
        _CHECK,
    ),
    Page(
        NONDETERMINISM,
        TITLES[NONDETERMINISM],
        "The same call, run twice in a row, gives different outputs. Atomics that add in another order differ by rounding, which "
        "is only information. A difference beyond the noise is a race: missing synchronisation, or memory that is not initialised.",
        "If it is serious, look for a missing barrier, for shared memory that is read too early, and for torch.empty.",
        _CHECK,
    ),
    Page(
        STATE_KEPT,
        TITLES[STATE_KEPT],
        "The same call gives another output after other calls. The kernel keeps something from call to call: a plan, a workspace, "
        "a result that is looked up by shape.",
        "Make the key of what is kept include everything that it depends on, or rebuild it for each batch.",
        _CHECK,
    ),
    Page(
        LSE_WRONG,
        TITLES[LSE_WRONG],
        "The kernel declares that it returns log-sum-exps, and one of them is further from the right one than noise explains. "
        "Outputs of parts of the keys are merged by them, so that a wrong one weights a part wrongly.",
        "Return the natural logarithm of the sum of exponentials of scaled scores, float32 [total_q, num_q_heads].",
        _CHECK,
    ),
    *(
        Page(
            bug.id, bug.title, f"{bug.about[0].upper()}{bug.about[1:]}.",
            "Return the natural logarithm of the sum of exponentials of scaled scores, float32 [total_q, num_q_heads].", _CHECK,
            reports=links(*bug.reports),
        )
        for bug in LSE_BUGS
    ),
    Page(
        INPUT_WRITTEN,
        TITLES[INPUT_WRITTEN],
        "The kernel writes to q, k, v or the sequence lengths. An engine uses these tensors again: K and V are the cache.",
        "Work on a copy, for example where the softmax scale is multiplied into q.",
        _CHECK,
    ),
    Page(
        CALL_REFUSED,
        TITLES[CALL_REFUSED],
        "The kernel raised KernelRefused. That breaks no contract, but what it refuses is not covered by a verdict.",
        "Declare what the kernel supports, for example @declares(head_dims=(64, 128)), so that it is a statement.",
        _CHECK,
        "warning",
    ),
    Page(
        CONTRACT_BROKEN,
        "kernel contract broken",
        "The kernel raised an exception, returned something other than [total_q, num_q_heads, head_dim_v] in the dtype and on "
        "the device of q, or returned the memory of an earlier output, which its caller may still hold.",
        "Fix it at the line that the finding names, or raise KernelRefused for calls that the kernel does not support.",
        _CHECK,
    ),
    Page(
        OUTPUT_SCALED,
        TITLES[OUTPUT_SCALED],
        "Every output is a multiple of what it should be. The slope of the output on the truth over many calls shows factors that "
        "are far within the noise of one call.",
        "Look at the denominator of the softmax, and at the scale of a quantised V.",
        _CHECK,
    ),
    Page(
        OUTPUT_NOT_WRITTEN,
        TITLES[OUTPUT_NOT_WRITTEN],
        "The output is zero where it should not be: most kernels that do this return before they store, or store elsewhere.",
        "Look at what ends a program early, at the launch grid, and at the mask of the store.",
        _CHECK,
    ),
    Page(
        QUANTISATION_NOT_RUN,
        TITLES[QUANTISATION_NOT_RUN],
        "The kernel declares a quantisation, and its error is smaller than any kernel with it can have. Another kernel probably "
        "ran, such as a fallback in full precision.",
        "Look for a fallback. If the kernel quantises less than it declares, correct its declaration.",
        _CHECK,
    ),
    Page(
        "own-error-out-of-bounds",
        "own error out of bounds",
        "In a server, on the inputs of real requests, the candidate's error is larger than noise explains, in these layers, heads "
        "and conditions. No recorded call gave the bug a name.",
        "Record calls of that condition and replay them: assay record, then assay replay.",
        _DIFF,
    ),
    Page(
        "gain",
        "output scaled",
        "In a server, the candidate's output is a multiple of the truth, by more than noise explains: a slope over all calls.",
        "Look at the denominator of the softmax, and at the scale of a quantised V.",
        _DIFF,
    ),
    Page(
        "noise-missing",
        "error smaller than the declared quantisation must cost",
        "In a server, the candidate's error is smaller than any kernel with its declared quantisation can have.",
        "Look for a fallback in full precision; see which kernels were traced.",
        _DIFF,
        "warning",
    ),
    Page(
        "reference-wrong",
        "the reference is not right, so it proves nothing about the candidate",
        "The reference's own error against attention in float64 is out of its bounds.",
        "Choose another reference with --reference, such as torch_native.",
        _DIFF,
        "warning",
    ),
    Page(
        "reference-erratic",
        "erratic reference",
        "The reference was asked some prompts twice, and its log-odds changed by more than noise explains. "
        "Its evidence about the candidate is then in doubt: such a run is no pass.",
        "Find out what makes the reference differ from run to run: batching, another load on the machine, or a race in its kernel.",
        _RUN,
        "warning",
    ),
    Page(
        "accuracy",
        "loss of accuracy",
        "The candidate answers fewer questions right than the reference, by more than the margin. The finding names the condition "
        "that separates right from wrong answers, if there is one.",
        "Find the layer and the bug that cause it with assay diff; the suite \"layers\" of a run does the same.",
        _RUN,
    ),
    Page(
        "layers-need-reference",
        "layers that must run the reference",
        "With the candidate in these layers, answers or texts are wrong; with the reference in them, they are right again.",
        "Replay recorded calls of these layers: assay record, then assay replay.",
        "assay bisect layers --candidate mine:forward",
    ),
    Page(
        "latency",
        "slower than the bound allows",
        "The ratio of the candidate's time to the reference's is above the bound, and the reference itself differs by less.",
        "See in which shapes and at which concurrency, and time the kernel alone: assay bench kernel.",
        _BENCH,
    ),
    Page(
        "answer-lengths",
        "answers differ in length",
        "The candidate's answers to the same prompts are shorter or longer than the reference's, or run to the token limit more "
        "often. Right answers that are 30 % longer cost 30 % more, and whoever times complete answers measures that instead of the "
        "kernel. In a run, a ratio of lengths that is shown to be beyond length_bound is a regression; a bench times both at one "
        "forced length.",
        "Find out why the texts differ: the suites greedy and layers of a run.",
        _BENCH,
        "warning",
    ),
    Page(
        "feature-changes-output",
        "features that must change nothing change the output",
        "The same tokens were scored with some features of the engine on, such as the prefix cache and chunked prefill, and have "
        "other log-probabilities than without, by more than rounding explains. The finding names the smallest set of features with "
        "which that happens, the first position at which it shows, and where it was observed the layer and the head at which the "
        "model's attention calls part: before attention, in the KV cache, in attention, or behind it.",
        "Run the finding's command, which compares these features alone and together; then look at what the engine does at that "
        "position and in that place: the borders of pages and chunks, what comes from the cache, and what is computed before it.",
        "assay invariance",
    ),
    Page(
        "impossible-speed",
        "faster than the device",
        "The kernel took less time than the device needs to read its inputs or to multiply, so it did not do all of the work.",
        "Check the kernel for correctness on these shapes: assay check, assay replay.",
        _BENCH_KERNEL,
    ),
    Page(
        "wrong-kernel-timed",
        "speed of a wrong kernel",
        "The kernel is wrong on the calls that were timed. Its times are for different work.",
        "Fix the bug that the finding's evidence names, then time again.",
        _BENCH_KERNEL,
    ),
)  # fmt: skip
OTHERS = {page.id: page for page in _PAGES}
"""Finding -> its page, without variants. A test holds it against the ids that the code gives."""
