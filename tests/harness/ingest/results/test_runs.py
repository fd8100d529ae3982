from __future__ import annotations

from types import ModuleType

from assay.harness.ingest.results.runs import changes_of
from assay.harness.judge.report import NOT_FINITE, DepthRow, OwnError, Report


def with_layers(report: Report, examples: ModuleType, *own: OwnError, out: bool = False) -> Report:
    layers = examples.hostile().layers
    depth = tuple(DepthRow(layer=n, own=error, out_of_bounds=out) for n, error in enumerate(own))
    return report.model_copy(update={"layers": layers.model_copy(update={"depth": depth})})


def changed(a: Report, b: Report) -> dict[str, tuple[str, str, bool | None]]:
    return {one.id: (one.a, one.b, one.worse) for one in changes_of(a, b)}


def test_own_errors_of_layers(examples: ModuleType) -> None:
    good = examples.passing()
    a = with_layers(good, examples, 0.01, 0.01, 0.02, 0.01, None)
    b = with_layers(good, examples, 0.0105, 0.02, 0.01, NOT_FINITE, None, out=True)
    assert changed(a, b) == {  # layer 0 differs by less than two runs of one kernel do
        "own-error-1": ("1.00e-02", "2.00e-02", True),
        "own-error-2": ("2.00e-02", "1.00e-02", False),
        "own-error-3": ("1.00e-02", NOT_FINITE, True),
    }
    assert changed(a, good) == {}


def test_latency(examples: ModuleType) -> None:
    slow, good = examples.latency(), examples.passing()
    row = slow.rows[0]
    fast = slow.model_copy(update={"rows": (row.model_copy(update={"ratio": row.ratio / 2}), *slow.rows[1:])})
    a, b = (good.model_copy(update={"latency": one}) for one in (fast, slow))
    ((name, (_, _, worse)),) = changed(a, b).items()
    assert (name.startswith(f"latency-{row.metric}"), worse) == (True, True)
    assert [one[2] for one in changed(b, a).values()] == [False]


def test_the_environment_and_findings(examples: ModuleType) -> None:
    good, bad = examples.passing(), examples.regression()
    other = good.model_copy(
        update={"environment": good.environment.model_copy(update={"python": "3.9", "packages": {"new": "1"}})}
    )
    found = changed(good, other)
    assert found["environment-python"][1:] == ("3.9", None)
    assert found["environment-package-new"] == ("none", "1", None)
    assert changed(bad, good)["finding-accuracy"] == ("found", "not found", False)
