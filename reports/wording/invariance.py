"""Sentences about features that should not affect outputs: what each variant shows, and where it diverges from its base."""

from __future__ import annotations

from collections.abc import Sequence

from assay.harness.statement import Statement
from assay.harness.text import counted, listed
from assay.harness.verdict import Requirement
from assay.reports.wording.requirements import said_check
from assay.reports.wording.say import Cases, Found, Templates, say, says

NO_ARM = "not in any variant that finished"
"""The reason why a feature is not covered although a variant was planned with it."""
_RUN_AGAIN = "run it again"
_DISAGREES = "the same tokens are scored differently without any feature: see which probes, alone and in batches"
_Means = list[tuple[str, float]]
_Alone = list[tuple[str, float | str]]


def clauses(statements: Sequence[Statement]) -> str:
    """Say several statements in one clause."""
    return "; ".join(map(say, statements))


@says
def _requirement_unmet(requirement: str, outcome: Statement) -> str:
    said = said_check(Requirement(requirement).check("missing", outcome))
    return f"{said.title}: {said.found}."


@says
def _feature_changes_output(
    arm: str, titles: list[str], askings: tuple[int, int] | None, kl: float | None, why: list[Statement], alone: _Alone
) -> str:
    what = f"{clauses(why)}," if kl is None else f"mean KL {kl:.2g} nats"
    of = f", in {askings[0]} of {askings[1]} askings" if askings else ""
    return f"{arm}: {what} where {listed(titles)}{of}{f'; {_each_alone(alone)}' if alone else ''}"


_ALONE = {"larger same": "no difference in larger variants", "not run": "not run"}


@says
def _each_alone(alone: _Alone) -> str:
    shown = [(arm, _ALONE[kl] if isinstance(kl, str) else f"{kl:.2g}") for arm, kl in alone]
    return f"each alone: {'; '.join(f'{arm}: {does}' for arm, does in shown)}"


@says
def _not_in_command(environment: list[str], interpreter: str | None) -> str:
    beyond = [*environment, *([f"interpreter {interpreter}"] if interpreter else [])]
    return f"not in the command, which has no flag for it: {listed(beyond)}"


_NAMES = {"q": "q", "k": "K", "v": "V", "output": "the output"}


@says
def _inside_the_model(
    place: str, layer: int, names: list[str], head: int | None, position: int | None, positions: int, error: float, bound: float,
    before: int | None, layers: int,
) -> str:  # fmt: skip
    """Say where a request diverges from the base's, and which causes remain."""
    if place.startswith("behind"):
        after = "after the last layer" if place == "behind layers" else "after the last layer's attention"
        outputs = "the outputs of attention and of the layer" if place == "behind layers" else "the output"
        return f"inside the model: {after}: in all {counted(layers, 'layer')} q, K, V and {outputs} are the same"
    if place == "layer":
        size = f"(a relative error of {error:.2g}; up to {bound:.2g} is rounding)"
        rest = "the output of its attention is the same: it is the output projection, a norm or the MLP"
        return f"inside the model: layer {layer}: the output of the layer differs {size}, and {rest}"
    what = f"{listed([_NAMES[name] for name in names])}{{}} {'differ' if len(names) > 1 else 'differs'}"
    size = f"a relative error of {error:.2g}, most in {'KV head' if names[0] in 'kv' else 'head'} {head}"
    size = f"({size}; up to {bound:.2g} is rounding)"
    if place == "input":
        rest = "" if before is None else f", and the output of attention in layer {before} is the same"
        if names == ["q", "k"]:
            rest = ": V is the same, so it is their positions, or RoPE"
        said = f"{what.format('')} as they are computed {size}{rest}"
    elif place == "cache":
        tokens = f"{counted(positions, 'token')}, first in token {(position or 0) + 1:,}"
        said = f"{what.format(' in the KV cache')} in {tokens} {size}, and what this request computes is the same"
    else:
        said = f"the output of attention differs {size}, and q, K and V are the same"
    return f"inside the model: layer {layer}: {said}"


def _said_means(means: _Means) -> str:
    return "; ".join(f"{measure}: mean KL {mean:.2g} nats" for measure, mean in means)


@says
def _base_agrees(means: _Means) -> Found:
    return Found(_said_means(means))


@says
def _base_disagrees(means: _Means, worst: float, at: str, changed: str, decode: bool) -> Found:
    where = f"at worst {worst:.2g} at {at}" if at else ""
    do = "decode computes something else than prefill for the same tokens: assay backends --honours compares both with the truth"
    return Found("; ".join(filter(None, [_said_means(means), where, changed])), do if decode else _DISAGREES)


@says
def _probes_not_under_fault(said: str | None) -> Found:
    return Found("no fault was seeded" if said is None else said or "the probes were not answered", _RUN_AGAIN)


@says
def _probes_under_fault(means: _Means) -> Found:
    return Found(_said_means(means), "use real weights (without --load-format=dummy)")


@says
def _features_not_on(features: list[tuple[str, str]]) -> Found:
    said = "; ".join(f"{feature}: {why or 'not in any variant'}" for feature, why in features)
    return Found(said, "see why the server switched them off, or leave them out with --features")


@says
def _arms_undecided(arms: list[tuple[str, list[Statement]]]) -> Found:
    said = "; ".join(f"{arm}: {clauses(why)}" for arm, why in arms)
    return Found(said, "read the logs of their servers, or leave the features out with --features")


SENTENCES: Templates = {
    "arm-distance": "{measure}: mean KL {mean:.3g} nats over {positions:,} positions, at worst {worst:.3g}",
    "probes-answered": Found("{probes:counted probe}, {tokens:,} tokens"),
    "arm-served-otherwise": "its server (B) differs from its base's (A): {differs:parts}",
    "arms-recorded": Found("{ended:if |it ended early, after }{arms:counted variant}", _RUN_AGAIN),
    "arms-decided": Found("{arms:counted variant}", _RUN_AGAIN),
    "features-change-output": "{first}{further:if , and {further:counted further set} of features|}.",
    "features-change-nothing": "{features:counted feature} in {arms:counted variant} changed nothing in {backend}.",
    "arms-served-otherwise": Found(
        "{first}; {arms:counted variant} in total", "see assay compare of both servers' folders, and run it again"
    ),
    "arms-served-alike": Found(
        "{parts:if what {servers:counted server} served agrees in {parts:counted part}|every variant ran in the server of its base}"
    ),
    "probes-cut-short": Found(
        "{probes} were not, the first, {first}, with {tokens} of {asked} tokens", "see why in the log of its server"
    ),
    "features-on": Found("{features:counted feature}: {features:commas}"),
    "arms-not-recorded": Found("{arms:counted planned variant} without a record: {arms:parts 6}", _RUN_AGAIN),
    "shows-nothing": Cases(
        "why",
        {
            "failed": "{said:or no probe was answered}",
            "feature": "{feature} was not shown to be on: {said:or nothing shows it}",
            "base": "its base, {base}, was not run",
            "floor": _DISAGREES,
            "noise": "it differs at probe {probe} by more than rounding explains, and the base differs from itself as much",
            "texts": "{written} of {texts} greedy texts were written",
            "probes": "{answered} of {probes:counted probe} were answered",
            "scores": "nothing of probe {probe} was compared",
            "prompt": "another part of the prompt of probe {probe} was scored",
            "answer": "the answer to probe {probe} is not the one that was forced",
            "server": "it is not known what its server really ran",
            "parts": "no part of its server's fingerprint was observed on both sides",
        },
    ),
    "arm-differs": Cases(
        "by",
        {
            "cache": "the prefix cache gave {answers:counted prompt} blocks of another one, the first to probe {probe}: "
            "{cached:counted token} came from it, and {shared} had been asked before",
            "texts": "{parted} of {texts} greedy texts diverge, the first, {first}, at token {token}",
            "ends of texts": "{texts:counted greedy text} ended differently, the first, {first}: {now[0]} after "
            "{now[1]:counted token} instead of {before[0]} after {before[1]:counted token}",
            "lengths": "{answers:counted answer} had another length, the first to probe {probe}: {now:counted token} "
            "instead of {before}",
            "ends": "{answers:counted answer} ended differently, the first to probe {probe}: {now} instead of {before}",
            "tokens": "{answers:counted answer} diverged without a tie, the first to probe {probe}, at token {token}",
            "drafts declared": "{accepted:.2f} tokens were accepted per pass, but a draft by the model itself gives {declared:g}",
            "drafts": "drafts were lost: the same tokens took {passes} passes instead of {alone} ({arm})",
        },
    ),
    "seen-besides": Cases(
        "what",
        {
            "probes": "probes that differ: {names:commas}",
            "unsteady": "not reduced, since it does not differ every time",
        },
    ),
    "inside-not-observed": Cases(
        "why",
        {
            "texts": "inside the model: not observed: no token of a probe differs, only the generated text",
            "not asked": "inside the model: not observed: it was not asked again with a trace",
            "drafts": "inside the model: not observed: its passes verify drafts, where attention is not traced",
            "same": "inside the model: not observed: asked again with the trace on, it did not differ there",
            "": "inside the model: not observed: {said}",
        },
    ),
}
