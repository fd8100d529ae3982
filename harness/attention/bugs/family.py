"""The family of hypotheses: every known bug."""

from __future__ import annotations

from assay.harness.attention.bugs import (
    features,
    heads,
    leaks,
    masks,
    merges,
    precision,
    prefixes,
    quantisation,
    scales,
)
from assay.harness.attention.bugs.bug import LEAK, Bug, links

KIND_TITLES = {
    LEAK: "Leaks across requests",
    "mask": "Masks",
    "cached-prefix": "The cached prefix",
    "sliding-window": "Sliding windows",
    "softmax-scale": "Softmax scales",
    "kv-heads": "KV heads",
    "quantisation-scale": "Scales of a quantisation",
    "k-smoothing": "K smoothing",
    "last-block-lost": "The last partial block",
    "newest-token": "The newest token",
    "accumulator": "Accumulators",
    "saturation": "Saturation",
    "overflow": "Overflow",
    "window": "Windows that a layer asks for",
    "softcap": "Soft caps",
    "sinks": "Attention sinks",
    "temperature": "Temperature",
    "rows-and-strides": "Rows and strides",
    "padding": "Padded rows",
    "stored-kv": "Stored K and V",
    "latent": "Latent attention",
}
"""Kind of bugs -> heading, in the order of `FAMILY`."""
_ROOMS = (leaks, masks, prefixes, scales, heads, quantisation, precision, merges, features)
FAMILY: tuple[Bug, ...] = tuple(bug for kind in KIND_TITLES for room in _ROOMS for bug in room.BUGS if bug.kind == kind)
"""Every known bug, leaks first; ids are unique."""
BY_ID = {bug.id: bug for bug in FAMILY}


def public_reports(hypothesis: str) -> tuple[str, ...]:
    """List the addresses of public reports of a known bug."""
    return links(*BY_ID[hypothesis].reports) if hypothesis in BY_ID else ()
