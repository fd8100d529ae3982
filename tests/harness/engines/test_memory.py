from pathlib import Path

import pytest

from assay.harness.engines import memory
from assay.harness.engines.memory import GIB, available_bytes, hold_both, mem_fraction, model_bytes
from assay.harness.errors import UsageError
from assay.harness.sides import Side

TINY = 8 * 1024**2
SGLANG, VLLM = Side(backend="triton"), Side(engine="vllm", backend="CPU_ATTN")


def with_share(share: str) -> Side:
    return Side(backend="triton", flags=(f"--mem-fraction-static={share}",))


@pytest.mark.parametrize(
    ("device", "weights", "available", "both"),
    [
        ("cpu", TINY, 24 * GIB, True),
        ("cpu", TINY, 5 * GIB, False),  # two servers need 6 GiB before any model
        ("cpu", 16 * GIB, 64 * GIB, False),  # an 8B model in bf16 needs 40 GiB each
        ("cpu", 16 * GIB, 90 * GIB, True),
        ("cuda", 16 * GIB, 139 * GIB, True),
        ("cuda", 16 * GIB, 24 * GIB, False),
        ("cuda", TINY, 0, False),  # free memory could not be read
    ],
)
def test_both_servers_are_held_if_memory_suffices(device: str, weights: int, available: int, both: bool) -> None:
    assert hold_both(device, [SGLANG] * 2, [weights] * 2, available) is both  # type: ignore[arg-type]


def test_unknown_sizes_and_large_fractions_leave_no_room_for_a_second_server() -> None:
    assert not hold_both("cpu", [SGLANG] * 2, [None, TINY], 10**15)
    assert hold_both("cuda", [with_share("0.45"), SGLANG], [TINY] * 2, 139 * GIB)
    assert not hold_both("cuda", [SGLANG, with_share("0.5")], [TINY] * 2, 139 * GIB)


def test_each_engine_takes_what_it_takes() -> None:
    assert hold_both("cpu", [SGLANG, VLLM], [TINY] * 2, int(5.1 * GIB))
    assert not hold_both("cpu", [SGLANG, SGLANG], [TINY] * 2, int(5.1 * GIB))
    assert not hold_both("cpu", [SGLANG, VLLM], [TINY] * 2, 5 * GIB), "3 and 2 GiB before any model"
    assert mem_fraction(Side(engine="vllm", backend="FLASH_ATTN", flags=("--gpu-memory-utilization=0.3",))) == 0.3


@pytest.mark.parametrize(
    ("engine_args", "expected"),
    [
        ((), 0.40),
        (("--mem-fraction-static=0.3",), 0.3),
        (("--mem-fraction-static", "0.3"), 0.3),
        (("--mem-fraction-static", "0.3", "--mem-fraction-static=0.35"), 0.35),  # argparse takes the last
        (("--page-size", "16"), 0.40),
    ],
)
def test_memory_fraction(engine_args: tuple[str, ...], expected: float) -> None:
    assert mem_fraction(Side(backend="triton", flags=engine_args)) == expected
    with pytest.raises(UsageError, match="'much'"):
        mem_fraction(Side(backend="triton", flags=(*engine_args, "--mem-fraction-static=much")))


def test_model_bytes_counts_weights_only(tmp_path: Path) -> None:
    assert model_bytes(tmp_path) is None
    (tmp_path / "model-1.safetensors").write_bytes(bytes(1000))
    (tmp_path / "model-2.safetensors").write_bytes(bytes(24))
    (tmp_path / "tokenizer.json").write_bytes(bytes(5000))
    assert model_bytes(tmp_path) == 1024


def test_available_memory_of_this_machine_is_plausible() -> None:
    assert 0 < available_bytes("cpu") < 10**15


@pytest.mark.parametrize(("limit", "left"), [(str(8 * GIB), 5 * GIB), ("max", None)])
def test_a_container_limit_counts_and_its_page_cache_does_not(tmp_path: Path, limit: str, left: int | None) -> None:
    assert memory._container_bytes(tmp_path / "absent") is None
    (tmp_path / "memory.max").write_text(f"{limit}\n")
    (tmp_path / "memory.current").write_text(f"{5 * GIB}\n")
    (tmp_path / "memory.stat").write_text(f"anon 1\ninactive_file {2 * GIB}\n")
    assert memory._container_bytes(tmp_path) == left
