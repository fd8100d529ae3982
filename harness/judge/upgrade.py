"""A report of an older schema -> one of the current schema, as plain JSON."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

Document = dict[str, Any]

# Version 1 had only names, from which checks and findings get their ids. A name that is not listed becomes kebab-case.
_CHECKS = (
    (r"the candidate's own kernel ran in every phase that it claims: (\w+)", r"kernel-ran-\1"),
    (r"the candidate's own kernel ran in every phase that it claims", "kernel-ran"),
    (r"decode was compiled, as --enable-torch-compile asks", "decode-compiled"),
    (r"both servers had the same model and flags but for the backend", "same-servers"),
    (r"both servers answered every question", "all-answered"),
    (r"the cached-prefix condition was exercised", "cached-prefix"),
    (r"a tensor of every layer was compared", "layers-compared"),
    (r"the logits were compared", "logits-compared"),
    (r"the answers are as right as the reference's", "accuracy-tested"),
    (r"the workload is sensitive", "workload-sensitive"),
    (r"the required suite (\w+) ran", r"required-\1"),
    (r"an accepted baseline of the (\w+) fits", r"\1-baseline"),
    (r"both servers were timed", "servers-timed"),
    (r"kernels ran as they do in service", "device-kernels"),
    (r"prompts of the shape (\S+) were prefilled in chunks", r"chunked-\1"),
    (r"the shared prefix came from the cache: (\S+), (\d+) in flight", r"shared-prefix-\1-\2"),
    (r"answers that may end when they like are as long as the reference's", "answer-lengths"),
)
_FINDINGS = (
    (r"causal mask top-left", "mask-top-left"),
    (r"no mask", "mask-missing"),
    (r"(keys|values) of the (previous|next) request", r"leak-\1-\2"),
    (r"keys and values of the (previous|next) request", r"leak-keys-values-\1"),
    (r"cached prefix of the (previous|next) request", r"leak-prefix-\1"),
    (r"(last|first) key of the (previous|next) request seen", r"leak-\1-key-\2"),
    (r"all keys of the (previous|next) request seen", r"leak-all-keys-\1"),
    (r"prefix shifted one token (late|early)", r"prefix-one-token-\1"),
    (r"prefix values shifted against keys", "prefix-values-shifted"),
    (r"sliding window of (\d+)", r"sliding-window-\1"),
    (r"scale applied twice", "scale-twice"),
    (r"exp2 without log2\(e\)", "exp2-without-log2e"),
    (r"log2\(e\) applied to exp", "exp-with-log2e"),
    (r"GQA heads interleaved", "kv-heads-interleaved"),
    (r"kv head of the (next|previous) group", r"kv-head-\1-group"),
    (r"([KQ]) scale of the (previous|next) block", r"\1-scale-\2-block"),
    (r"K smoothed in new keys only", "k-smoothed-new-only"),
    (r"last partial block of (\d+) lost", r"last-block-lost-\1"),
    (r"(fp16|bf16) accumulator", r"accumulator-\1"),
    (r"(values|scores) saturate at (fp8 e4m3|fp16)", r"\1-saturate-\2"),
    (r"no known cause fits", "unexplained"),
    (r"state", "state-kept"),
    (r"input written to", "input-written"),
    (r"speed of a wrong kernel", "wrong-kernel-timed"),
)
_METRICS = {
    "reference's own floor": "reference-floor",
    "loss of accuracy since it was accepted": "loss-since-accepted",
    "growth of own error": "own-error-growth",
    "worst ratio of times": "worst-time-ratio",
}


def upgrade(document: Document) -> Document:
    """A report of schema ``assay.report/1`` as one of ``assay.report/2``.

    Version 2 has ids, and titles where version 1 had names and kinds; it counts the answers lost by condition, which version 1
    did not (null).
    """
    upgraded = _checked(document) | {
        "schema": "assay.report/2",
        "suites": [_suite(suite) for suite in document.get("suites", ())],
    }
    if document.get("latency"):
        upgraded["latency"] = _checked(document["latency"]) | {"schema": "assay.bench/2"}
    return upgraded


def _checked(document: Document) -> Document:
    """A document with its checks and findings upgraded."""
    return document | {
        "checks": [_titled(check, "name", _id(check["name"], _CHECKS)) for check in document.get("checks", ())],
        "findings": [_titled(one, "kind", _id(one["kind"], _FINDINGS)) for one in document.get("findings", ())],
    }


def _suite(suite: Document) -> Document:
    metrics = [_titled(one, "name", _METRICS.get(one["name"], kebab(one["name"]))) for one in suite.get("metrics", ())]
    conditions = [
        _titled(row, "by", f"{kebab(row['by'])}-{kebab(row['bucket'])}") | {"by": kebab(row["by"])}
        for row in suite.get("conditions", ())
    ]
    renamed = {"id" if key == "name" else key: value for key, value in suite.items()}
    return renamed | {"metrics": metrics, "conditions": conditions}


def _titled(part: Document, was: str, id_: str) -> Document:
    """A part with an id, whose prose under the key `was` becomes its title."""
    return {"id": id_, "title": part[was]} | {key: value for key, value in part.items() if key != was}


def _id(title: str, known: Iterable[tuple[str, str]]) -> str:
    for pattern, id_ in known:
        if found := re.fullmatch(pattern, title):
            return kebab(found.expand(id_))
    return kebab(title)


def kebab(prose: str) -> str:
    """Prose as an id: "layer x head" is "layer-x-head", ">= 16" is "at-least-16"."""
    words = re.sub(r">= (\d+)|(\d+) and more|(\d+)\+", r"at least \1\2\3", prose)
    return "-".join(re.findall(r"[a-z0-9]+", words.lower()))
