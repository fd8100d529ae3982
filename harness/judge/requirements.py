"""The requirements of a pass, with a title for each way in which a check of one can come out.

A check that is not met never prints what it requires as if that held. A requirement without a title for an outcome cannot have it.
"""

from __future__ import annotations

from assay.harness.verdict import Requirement

_ALL = (
    Requirement(
        "kernel-ran",
        "the candidate's own kernel ran in every phase that it claims",
        failed="something else computed calls that the candidate claims",
        missing="no call of the candidate's own kernel was counted",
    ),
    Requirement(
        "kernel-executed",
        "the candidate's own kernels ran in a traced pass",
        failed="a traced pass does not show that the candidate's own kernels ran",
        missing="it is not shown that the candidate's own kernels ran in a traced pass",
        unchecked="the names of the candidate's own kernels are not known",
    ),
    Requirement(
        "decode-compiled",
        "decode ran compiled, as --enable-torch-compile asks",
        missing="decode did not run compiled, as --enable-torch-compile asks",
    ),
    Requirement(
        "same-servers",
        "the servers differed in the treatment and in nothing else",
        failed="the servers did not differ in the treatment alone",
        missing="it is not shown that the servers differed in the treatment alone",
    ),
    Requirement(
        "calls-reconciled",
        "the counted calls are those of the answered requests",
        failed="the counted calls are not those of the answered requests",
        missing="the counted calls could not be compared with the answered requests",
    ),
    Requirement(
        "answers-parsed",
        "the letters of the answers are those of their texts",
        failed="letters were recorded that are not those of the texts",
    ),
    Requirement(
        "question-plan",
        "the order of the questions and the rule to stop were fixed before the first was asked",
        missing="it is not shown that order and rule to stop were fixed before the first question was asked",
    ),
    Requirement(
        "all-answered", "both servers answered every question", missing="a question was not answered by both servers"
    ),
    Requirement("accuracy-tested", "accuracy was tested", unchecked="accuracy was not tested"),
    Requirement(
        "answer-lengths",
        "{candidate}'s answers are as long as {reference}'s, where no length is forced",
        missing="{candidate}'s answers are not as long as {reference}'s, where no length is forced",
        unchecked="it is not known if {candidate}'s answers are as long as {reference}'s",
    ),
    Requirement(
        "finish-reasons",
        "{candidate}'s answers end as {reference}'s do",
        failed="{candidate}'s answers do not end as {reference}'s do",
        unchecked="it is not known if {candidate}'s answers end as {reference}'s do",
    ),
    Requirement(
        "layers-compared",
        "every layer's output was compared with the truth",
        failed="the candidate did not compute every call",
        missing="not every layer's output was compared with the truth",
        unchecked="no layer's output was compared with the truth",
    ),
    Requirement(
        "cached-prefix",
        "the cached-prefix condition was exercised",
        missing="it is not shown that the cached-prefix condition was exercised",
    ),
    Requirement(
        "matrix-ran",
        "the candidate's kernel ran on the op-level matrix",
        missing="the candidate's kernel did not run on the op-level matrix",
    ),
    Requirement(
        "candidate-baseline",
        "an accepted baseline of the candidate matches",
        missing="the accepted baseline of the candidate is stale",
        unchecked="no baseline of the candidate was accepted",
    ),
    Requirement(
        "reference-baseline",
        "an accepted baseline of the reference matches",
        unchecked="no accepted baseline of the reference matches",
    ),
    Requirement(
        "workload-sensitive",
        "every suite saw a fault that was seeded in the running servers",
        missing="not every suite saw a fault that was seeded in the running servers",
        unchecked="no fault was seeded in the running servers",
    ),
    Requirement(
        "envelope-covered",
        "the envelope of the policy was covered",
        missing="the envelope of the policy was not covered",
        unchecked="it was not asked to cover the envelope of the policy",
    ),
    Requirement(
        "envelope-served",
        "the candidate's own server answered over the envelope",
        missing="the candidate's own server was not compared over the whole envelope",
        unchecked="the candidate's own server was not asked over the envelope",
    ),
    Requirement("logits-compared", "the logits were compared", missing="the logits were not compared"),
    Requirement(
        "features-switched",
        "the candidate's features that must change nothing were switched",
        missing="the candidate's features that must change nothing were not all switched",
    ),
    Requirement(
        "policy",
        "no limit of the policy is wider than its default",
        unchecked="a limit of the policy is wider than its default",
    ),
    Requirement("required", "a required suite ran", missing="a required suite did not run"),
    Requirement(
        "repeated",
        "no run of the treatment came out otherwise before",
        unchecked="a run of the treatment came out otherwise before",
    ),
    Requirement("servers-timed", "both servers were timed", missing="the servers were not timed"),
    Requirement(
        "device-kernels",
        "kernels ran on the device, not interpreted",
        failed="kernels were interpreted and did not run on a device",
    ),
    Requirement(
        "chunked",
        "long prompts were prefilled in chunks",
        missing="it is not shown that long prompts were prefilled in chunks",
    ),
    Requirement(
        "shared-prefix",
        "the shared prefix came from the cache",
        missing="it is not shown that the shared prefix came from the cache",
    ),
    Requirement("invariance-ended", "every arm was recorded, up to the last", missing="not every arm was recorded"),
    Requirement(
        "probes-answered",
        "the base answered every probe to its end",
        missing="the base did not answer every probe to its end",
    ),
    Requirement(
        "base-agrees",
        "the base agrees with itself in other batches",
        missing="the base does not agree with itself in other batches",
    ),
    Requirement(
        "probes-sensitive",
        "the probes see a fault that was seeded in the running server",
        missing="it is not shown that the probes see a fault that was seeded in the running server",
    ),
    Requirement(
        "features-on", "every feature was shown to be on in some arm", missing="a feature was shown to be on in no arm"
    ),
    Requirement("arms-decided", "every arm decided", missing="an arm did not decide"),
    Requirement(
        "pairs-covered", "every two features were on together", unchecked="not every two features were on together"
    ),
)
REQUIRED = {requirement.id: requirement for requirement in _ALL}
"""By id of the check; of some requirements, each part has a check of its own (`Requirement.of`)."""
