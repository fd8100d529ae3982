from __future__ import annotations

import pytest

from assay.harness.ingest.sglang_patterns import pieces


def split(text: str) -> list[tuple[str, str, str]]:
    """The kind of each piece, its text, and how far a bar is."""
    return [(kind, part, bar["done"] if bar else "") for kind, part, bar in pieces(text)]


def kinds(text: str) -> list[str]:
    return [kind for kind, _, _ in pieces(text)]


def test_a_plain_line_is_one_piece() -> None:
    assert [(kind, text) for kind, text, _ in split("100 % sure")] == [("text", "100 % sure")]
    assert kinds("") == ["text"]


def test_bars_that_lost_their_carriage_returns_are_told_apart() -> None:
    line = (
        "  0%|                    | 0/8 [00:00<?, ?it/s]Capturing batches (bs=32 avail_mem=5.00 GB):   0%|       | 0/8 [00:00<?, "
        "?it/s][2026-01-24 18:16:03] Failed to load JIT"
    )
    found = split(line)
    assert [kind for kind, _, _ in found] == ["progress", "progress", "text"]
    assert found[1][1:] == ("Capturing batches (bs=32 avail_mem=5.00 GB)", "0")
    assert found[2][1] == "[2026-01-24 18:16:03] Failed to load JIT"


@pytest.mark.parametrize("cut", ["1.38s/i", "2.38it/", "4.27it/s", "29.90s/it", "4.35it/s]", "", "?it/s]"])
def test_bars_cut_at_the_width_of_the_terminal(cut: str) -> None:
    bar = "Capturing batches (bs=16):  {}%|▍| {}/8 [00:01<00:02,  {}"
    line = bar.format(38, 3, cut) + bar.format(50, 4, "2.38it/")
    assert [done for _, _, done in split(line)] == ["3", "4"]


def test_carriage_returns_and_percent_completed() -> None:
    line = "\rShards:  25% Completed | 1/4 [00:00<00:00,  6.33it/s]\rShards: 100% Completed | 4/4 [00:03<00:00,  1.32it/s]"
    assert kinds(line) == ["text", "progress", "progress"]


def test_text_before_a_bar_is_not_lost() -> None:
    found = split("PASSED 12%|█▏        | 1/8 [00:00<00:01,  1.00it/s]")
    assert [kind for kind, _, _ in found] == ["text", "progress"]
    assert found[0][1] == "PASSED"


def test_names_of_tests_and_labels_are_pieces() -> None:
    found = split("test/a_b/test_x.py::TestY::test_z[1-a] [CI Test Method] TestY.test_z")
    assert [(kind, text) for kind, text, _ in found] == [
        ("test-start", "test/a_b/test_x.py::TestY::test_z[1-a]"),
        ("text", "[CI Test Method] TestY.test_z"),
    ]
    assert kinds("Error: [2026-01-24 18:16:20] x") == ["label", "text"]
    assert kinds("Error: no label, since no record follows") == ["text"]
