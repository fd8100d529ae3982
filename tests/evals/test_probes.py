from __future__ import annotations

import pytest

from assay.evals.probes import CHUNK, DEPTH, PAGE, ProbeLoad, probe_load


@pytest.fixture(params=["cpu", "cuda"])
def load(request: pytest.FixtureRequest) -> tuple[str, ProbeLoad]:
    return request.param, probe_load(request.param, 4096, 1000)


def test_probes_feel_pages_chunks_long_prefixes_and_deep_decode(load: tuple[str, ProbeLoad]) -> None:
    device, made = load
    lengths = {len(probe.ids) for probe in made.probes}
    for border in (PAGE, CHUNK[device]):
        assert {border - 1, border, border + 1} <= lengths
    shared = {probe.shared for probe in made.probes}
    assert {PAGE - 1, PAGE, PAGE + 1, CHUNK[device] - 1, CHUNK[device], CHUNK[device] + 1, 2 * CHUNK[device], 1024} <= shared
    assert any(probe.shared > 1000 and len(probe.ids) - probe.shared > CHUNK[device] for probe in made.probes)
    depths = [probe.depth for probe in made.probes]
    assert sum(depth > DEPTH // 2 for depth in depths) >= 4
    assert 1 <= depths.count(DEPTH) <= 4, "more would never decode in the batches that torch-compile compiles"
    assert len(made.probes) == {"cpu": 21, "cuda": 33}[device]


def test_a_probe_begins_with_the_prefix_and_then_parts_from_it_and_from_others(load: tuple[str, ProbeLoad]) -> None:
    made = load[1]
    for probe in made.probes:
        assert probe.ids[: probe.shared] == made.prefix[: probe.shared]
        assert probe.ids[probe.shared] != made.prefix[probe.shared]
        assert len(probe.ids) - probe.shared >= 2, "something is left to score"
    parting = [(probe.shared, probe.ids[probe.shared]) for probe in made.probes]
    assert len(set(parting)) == len(parting)
    assert len({probe.id for probe in made.probes}) == len(made.probes)


def test_a_short_context_has_the_probes_that_fit() -> None:
    made = probe_load("cpu", 512, 1000)
    assert max(len(probe.ids) + probe.depth for probe in made.probes) <= 512
    assert len(made.prefix) + DEPTH <= 512
    assert len(made.probes) == 21
