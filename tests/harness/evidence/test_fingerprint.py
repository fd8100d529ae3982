"""The record of a fingerprint."""

from __future__ import annotations

from assay.harness.evidence.fingerprint import Tokens


def test_token_ids_have_a_digest_that_is_read_back() -> None:
    made = Tokens(bos=0, texts={"a": (1, 2)}, chats={"user": (0, 5)})
    assert len(made.digest) == 16
    assert made.digest == Tokens(chats={"user": (0, 5)}, texts={"a": (1, 2)}, bos=0).digest
    others = [
        Tokens(),
        Tokens(bos=0, texts={"a": (1, 3)}, chats={"user": (0, 5)}),
        Tokens(bos=0, bare={"a": (1, 2)}, chats={"user": (0, 5)}),
    ]
    assert made.digest not in {other.digest for other in others}
    assert Tokens.model_validate_json(made.model_dump_json()) == made
    assert Tokens.model_validate_json('{"digest": ""}').digest == ""
