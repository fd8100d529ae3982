"""The requirements of a pass, with titles that say how a check of one came out.

A check that is not met never prints what it requires as if that held: where no other words are given, `Requirement` says that it is
not shown, or that it was not checked.
"""

from __future__ import annotations

from assay.harness.verdict import Requirement

_ALL = (
    Requirement(
        "kernel-ran", "the candidate's own kernel ran in every phase that it claims",
        failed="something else computed calls that the candidate claims",
    ),
    Requirement(
        "kernel-executed", "the candidate's own kernels ran in a traced pass",
        failed="a traced pass does not show that the candidate's own kernels ran",
        unchecked="the names of the candidate's own kernels are not known",
    ),
    Requirement(
        "decode-compiled", "decode ran compiled, as --enable-torch-compile asks",
        missing="decode did not run compiled, as --enable-torch-compile asks",
    ),
    Requirement(
        "same-servers", "the servers differed in the treatment alone",
        failed="the servers did not differ in the treatment alone",
    ),
    Requirement(
        "calls-reconciled", "the counted calls are those of the answered requests",
        failed="the counted calls are not those of the answered requests",
    ),
    Requirement(
        "answers-parsed", "the letters of the answers are those of their texts",
        failed="letters were recorded that are not those of the texts",
    ),
    Requirement("question-plan", "the order of the questions and the rule to stop were fixed before the first was asked"),
    Requirement("all-answered", "both servers answered every question", missing="a question was not answered by both servers"),
    Requirement("accuracy-tested", "accuracy was tested", unchecked="accuracy was not tested"),
    Requirement(
        "answer-lengths", "{candidate}'s answers are as long as {reference}'s, where no length is forced",
        missing="{candidate}'s answers are not as long as {reference}'s, where no length is forced",
        unchecked="it is not known if {candidate}'s answers are as long as {reference}'s",
    ),
    Requirement(
        "finish-reasons", "{candidate}'s answers end as {reference}'s do",
        failed="{candidate}'s answers do not end as {reference}'s do",
        unchecked="it is not known if {candidate}'s answers end as {reference}'s do",
    ),
    Requirement(
        "layers-compared", "every layer's output was compared with the truth",
        failed="the candidate did not compute every call",
        unchecked="no layer's output was compared with the truth",
    ),
    Requirement("cached-prefix", "the cached-prefix condition was exercised"),
    Requirement(
        "matrix-ran", "the candidate's kernel ran on the op-level matrix",
        missing="the candidate's kernel did not run on the op-level matrix",
    ),
    Requirement(
        "candidate-baseline", "an accepted baseline of the candidate matches",
        missing="the accepted baseline of the candidate is stale",
        unchecked="no baseline of the candidate was accepted",
    ),
    Requirement(
        "reference-baseline", "an accepted baseline of the reference matches",
        unchecked="no accepted baseline of the reference matches",
    ),
    Requirement(
        "workload-sensitive", "every suite saw a fault that was seeded in the running servers",
        missing="not every suite saw a fault that was seeded in the running servers",
        unchecked="no fault was seeded in the running servers",
    ),
    Requirement("envelope-covered", "the envelope of the policy was covered", missing="the envelope of the policy was not covered"),
    Requirement(
        "envelope-served", "the candidate's own server answered over the envelope",
        missing="the candidate's own server was not compared over the whole envelope",
    ),
    Requirement("logits-compared", "the logits were compared", missing="the logits were not compared"),
    Requirement("features-switched", "the candidate's features that must change nothing were switched"),
    Requirement(
        "policy", "no limit of the policy is wider than its default",
        unchecked="a limit of the policy is wider than its default",
    ),
    Requirement("required", "a required suite ran", missing="a required suite did not run"),
    Requirement(
        "repeated", "no run of the treatment came out otherwise before",
        unchecked="a run of the treatment came out otherwise before",
    ),
    Requirement("servers-timed", "both servers were timed", missing="the servers were not timed"),
    Requirement(
        "device-kernels", "kernels ran on the device, not interpreted",
        failed="kernels were interpreted and did not run on a device",
    ),
    Requirement("chunked", "long prompts were prefilled in chunks"),
    Requirement("shared-prefix", "the shared prefix came from the cache"),
    Requirement("invariance-ended", "every arm was recorded, up to the last", missing="not every arm was recorded"),
    Requirement("probes-answered", "the base answered every probe to its end"),
    Requirement(
        "base-agrees", "the base agrees with itself in other batches",
        missing="the base does not agree with itself in other batches",
    ),
    Requirement("probes-sensitive", "the probes see a fault that was seeded in the running server"),
    Requirement("features-on", "every feature was on in some arm"),
    Requirement("arms-decided", "every arm decided", missing="an arm did not decide"),
    Requirement("pairs-covered", "every two features were on together", unchecked="not every two features were on together"),
)  # fmt: skip
REQUIRED = {requirement.id: requirement for requirement in _ALL}
"""By id of the check; of some requirements, each part has a check of its own (`Requirement.of`)."""
