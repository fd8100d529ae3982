"""The requirements of a pass, with titles that say how each check came out.

An unmet check never prints its requirement as if it held: without another text, its title says that the requirement is not shown,
or that it was not checked. The sentences about the policy and about earlier runs are here too.
"""

from __future__ import annotations

from typing import NamedTuple

from assay.harness.verdict import Check, CheckStatus
from assay.reports.wording.say import Found, Templates, found_of, says


class _Titles(NamedTuple):
    """The text for each outcome of a requirement's check, each a clause. They may name the two sides.

    Attributes:
        ok: the requirement.
        failed: if the check shows that it is not met; by default as `missing`.
        missing: if the check does not show that it is met; by default it says so.
        unchecked: if the check does not look; by default it says so.
    """

    id: str
    ok: str
    failed: str = ""
    missing: str = ""
    unchecked: str = ""


_ALL = (
    _Titles(
        "kernel-ran", "the candidate's own kernel ran in every phase that it claims",
        failed="something else computed calls that the candidate claims",
    ),
    _Titles(
        "kernel-executed", "the candidate's own kernels ran in a traced pass",
        failed="a traced pass does not show that the candidate's own kernels ran",
        unchecked="the names of the candidate's own kernels are not known",
    ),
    _Titles(
        "decode-compiled", "decode ran compiled, as --enable-torch-compile asks",
        missing="decode did not run compiled, as --enable-torch-compile asks",
    ),
    _Titles(
        "same-servers", "the servers differed only as intended",
        failed="the servers differ in more than intended",
    ),
    _Titles(
        "calls-reconciled", "the counted calls match the answered requests",
        failed="the counted calls do not match the answered requests",
    ),
    _Titles(
        "answers-parsed", "the letters of the answers match their texts",
        failed="some recorded letters do not match the texts",
    ),
    _Titles("question-plan", "the order of the questions and the rule to stop were fixed before the first was asked"),
    _Titles("all-answered", "both servers answered every question", missing="a question was not answered by both servers"),
    _Titles("accuracy-tested", "accuracy was tested", unchecked="accuracy was not tested"),
    _Titles(
        "answer-lengths", "{candidate}'s answers are as long as {reference}'s, if no length is forced",
        missing="{candidate}'s answers are not as long as {reference}'s, if no length is forced",
        unchecked="it is not known if {candidate}'s answers are as long as {reference}'s",
    ),
    _Titles(
        "finish-reasons", "{candidate}'s answers end as {reference}'s do",
        failed="{candidate}'s answers do not end as {reference}'s do",
        unchecked="it is not known if {candidate}'s answers end as {reference}'s do",
    ),
    _Titles(
        "layers-compared", "every layer's output was compared with the truth",
        failed="the candidate did not compute every call",
        unchecked="no layer's output was compared with the truth",
    ),
    _Titles("cached-prefix", "the cached-prefix condition was exercised"),
    _Titles(
        "matrix-ran", "the candidate's kernel ran on the op-level matrix",
        missing="the candidate's kernel did not run on the op-level matrix",
    ),
    _Titles(
        "workload-sensitive", "every suite detected a fault seeded in the running servers",
        missing="not every suite detected a fault seeded in the running servers",
        unchecked="no fault was seeded in the running servers",
    ),
    _Titles(
        "envelope-covered", "calls of all required lengths were compared",
        missing="not all required lengths were compared",
    ),
    _Titles(
        "envelope-served", "the candidate's own server answered at all required lengths",
        missing="the candidate's own server was not compared at all required lengths",
    ),
    _Titles("logits-compared", "the logits were compared", missing="the logits were not compared"),
    _Titles("probes-compared", "both servers answered the probes", missing="not both servers answered the probes"),
    _Titles(
        "policy", "no limit of the policy is wider than its default",
        unchecked="a limit of the policy is wider than its default",
    ),
    _Titles("required", "a required suite ran", missing="a required suite did not run"),
    _Titles("servers-timed", "both servers were timed", missing="the servers were not timed"),
    _Titles(
        "device-kernels", "kernels ran on the device, not interpreted",
        failed="kernels were interpreted and did not run on a device",
    ),
    _Titles("chunked", "long prompts were prefilled in chunks"),
    _Titles("shared-prefix", "the shared prefix came from the cache"),
    _Titles("invariance-ended", "every variant was recorded, up to the last", missing="not every variant was recorded"),
    _Titles("probes-answered", "the base answered every probe to its end"),
    _Titles(
        "base-agrees", "the base agrees with itself in other batches",
        missing="the base does not agree with itself in other batches",
    ),
    _Titles("probes-sensitive", "the probes detect a fault seeded in the running server"),
    _Titles("features-on", "every feature was on in some variant"),
    _Titles("arms-decided", "every variant decided", missing="a variant did not decide"),
    _Titles(
        "files-sound", "nothing in the files speaks against their scores", missing="a file speaks against its own scores"
    ),
    _Titles("same-tasks", "both have the same tasks"),
    _Titles("same-settings", "tasks, prompts and settings are the same"),
    _Titles("scores-agree", "the stated scores match the documents"),
    _Titles("all-paired", "every document is in both"),
    _Titles("all-read", "every record was understood"),
    _Titles(
        "same-prompts", "both were asked with the same prompts",
        unchecked="whether both were asked with the same prompts",
    ),
    _Titles(
        "execution", "the kernel under test computed the answers",
        unchecked="whether the kernel under test computed the answers",
    ),
    _Titles("two-results", "{candidate} is another result than {reference}"),
    _Titles("answers", "the answers of both runs are there", missing="the answers of both runs are not there"),
    _Titles("own-verdict", "{candidate} passes by its own report"),
)  # fmt: skip
_TITLES = {titles.id: titles for titles in _ALL}


def _title_of(check: Check) -> str:
    """Say in a clause how a check came out, such as "a question was not answered by both servers"."""
    titles = _TITLES.get(check.requirement) or _Titles(check.requirement, check.requirement)
    missing = titles.missing or f"it is not shown that {titles.ok}"
    clause = {
        "ok": titles.ok,
        "failed": titles.failed or missing,
        "missing": missing,
        "not checked": titles.unchecked or f"it was not checked that {titles.ok}",
    }[check.status]
    for name, side in zip(("{reference}", "{candidate}"), check.sides, strict=True):
        clause = clause.replace(name, side)
    return clause + (f": {check.part}" if check.part else "")


class SaidCheck(NamedTuple):
    """A check as text."""

    id: str
    status: CheckStatus
    title: str
    found: str
    settles: str


def said_check(check: Check) -> SaidCheck:
    """Put a check into sentences."""
    return SaidCheck(check.id, check.status, _title_of(check), *found_of(check))


@says
def _policy_weakened(lines: list[str], declared: str) -> Found:
    noise = [f"noise = {declared} (declared, and not in the policy)"] if declared else []
    return Found(
        "; ".join([*lines, *noise]),
        "leave lines of policy out for a verdict by the defaults; to accept a kernel's noise, name it in [policy.bounds]",
    )


SENTENCES: Templates = {
    "policy-strict": "margins, error rates and compared lengths are the defaults, or stricter",
    "suite-required": Found(
        "{ran:if it ran|it did not run}; {line}",
        "add {suite} to --suites, on servers that assay starts",
    ),
}
