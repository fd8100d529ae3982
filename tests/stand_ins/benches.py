"""Synthetic evidence of a bench. Loaded by path: test folders are not packages."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from assay.evals.loads import shapes_of
from assay.harness.config import make_spec
from assay.harness.evidence.bench_folder import TIMINGS, BenchFolder, BenchManifest, Timing
from assay.harness.evidence.counters import CounterFile, CounterRow
from assay.harness.evidence.fingerprint import FINGERPRINT, Fingerprint
from assay.harness.evidence.manifest import RESOLVED, ResolvedArguments, ServerManifest
from assay.harness.sides import ROLES, Engine, Role

SHAPES = ("short", "shared", "chunked")
ARGUMENTS: dict[Engine, dict[str, Any]] = {
    "sglang": {"chunked_prefill_size": 128, "page_size": 1},
    "vllm": {"scheduler_config": {"max_num_batched_tokens": 128}},
}
LAYERS = 2


def write_bench(
    path: Path,
    slow: dict[str, float] | None = None,
    rounds: int = 10,
    floor: float = 1.0,
    cached: bool = True,
    interpreted: bool = False,
    arguments: dict[str, Any] | None = None,
    counted: bool = True,
    flags: dict[str, Any] | None = None,
    nonce: str = "",
    packages: dict[Role, str] | None = None,
    tail: float = 0.0,
    resolved: bool = False,
    kind: Engine = "sglang",
) -> BenchFolder:
    """Write a bench's folder; the arguments select what is wrong in it. `packages` has the torch that each server told.

    `tail` is the share of the candidate's requests that take 20 times as long. With `resolved`, the engine resolves the
    command line of each side to the arguments that its server reports.
    """
    folder = BenchFolder.new(path, nonce)
    spec = make_spec({"candidate": "torch_native", "latency_shapes": SHAPES} | (flags or {}))
    shapes = shapes_of(SHAPES, "cpu")
    servers = tuple(
        ServerManifest(
            role=role,
            backend="torch_native",
            engine="SGLang 0 on cpu",
            kind=kind,
            claimed_phases=("extend", "decode"),
            launch_command=kind,
            arguments=ARGUMENTS[kind] | ((arguments or {}) if role == "candidate" else {}),
        )
        for role in ROLES
    )
    manifest = BenchManifest(
        nonce=folder.nonce,
        created="2026-01-01T00:00:00Z", spec=spec.model_dump(mode="json"), seed=0, shapes=shapes, eager=True, servers=servers,
        command="assay bench", packages={}, hardware="a machine", python="3.11", git="",
        model_hashes={"reference": "m", "candidate": "m"},
    )  # fmt: skip
    folder.write_manifest(manifest)
    for server in servers if resolved else ():
        folder.write(RESOLVED, ResolvedArguments(arguments=server.arguments), server.role)
    rng, clock, block = random.Random(0), 0.0, 0
    for number in range(rounds):
        for shape in shapes:
            for concurrency in (1, 4):
                order: list[tuple[Role, bool]] = [(role, again) for role in ROLES for again in (False, True)]
                rng.shuffle(order)
                for role, again in order:
                    factor = (slow or {}).get(shape.name, 1.0) if role == "candidate" else 1.0
                    factor *= floor if (role, again) == ("reference", True) else 1.0
                    factor *= rng.uniform(0.99, 1.01) * (3.0 if number == 0 else 1.0)
                    slower = [20.0 if role == "candidate" and rng.random() < tail else 1.0 for _ in range(concurrency)]
                    taken = [tuple(factor * by * (0.020 + 0.003 * i) for i in range(4)) for by in slower]
                    folder.append_lines(
                        TIMINGS, [
                            Timing(
                                role=role, again=again, round=number, block=block, shape=shape.name,
                                concurrency=concurrency, index=index, sent_s=clock, latency_s=times[-1] + 0.001 * factor,
                                chunk_s=times, chunk_tokens=(1, 2, 3, 4), prompt_tokens=shape.prompt,
                                completion_tokens=4, cached_tokens=shape.shared if cached else 0,
                            )
                            for index, times in enumerate(taken)
                        ]
                    )  # fmt: skip
                    clock, block = clock + 1, block + 1
    for role in ROLES if counted else ():
        counters = CounterFile(folder.server_folder(role) / "counters", "1", folder.nonce)
        for phase in ("extend", "decode"):
            row = CounterRow(
                backend="torch_native", kernel="torch_native", phase=phase, cached_prefix=True, interpreted=interpreted
            )
            for layer in range(LAYERS):
                counters.add(counters.row(row), layer)
    for role, torch in (packages or {}).items():
        made = Fingerprint(source="server", engine="SGLang 0 on cpu", model="tiny", packages={"torch": torch})
        FINGERPRINT.write(folder.server_folder(role), made, folder.nonce)
    folder.seal()
    return folder
