from __future__ import annotations

from assay.harness.judge import policy_checks as rules


def test_a_weaker_policy_is_named() -> None:
    assert rules.check_policy(()).status == "ok"
    assert rules.only_declared({}, {"reference": "int8_qk", "candidate": ""}) == []
    assert rules.only_declared({"int8_qk": 0.1}, {"candidate": "int8_qk"}) == []
    assert rules.only_declared({"exact": 0.1}, {"candidate": "int8_qk"}) == [
        "noise = int8_qk (declared by the kernel alone)"
    ]
    check = rules.check_policy(("margin = 0.1 (assay.toml, [policy])", "alpha = 0.2 (--alpha)"))
    assert (check.status, check.found) == ("not checked", "margin = 0.1 (assay.toml, [policy]); alpha = 0.2 (--alpha)")
