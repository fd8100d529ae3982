from __future__ import annotations

from assay.harness.ingest.sglang_facts import differing_arguments, parse_arguments


def test_values_stay_as_they_are_written() -> None:
    text = "a='x, y', b=[1, 2], c={}, d=None, e=-1.5, f=(1, 'z)'), g=\"it's\", h=<Kind.A: 0>, i='')"
    assert parse_arguments(text) == (
        {
            "a": "'x, y'",
            "b": "[1, 2]",
            "c": "{}",
            "d": "None",
            "e": "-1.5",
            "f": "(1, 'z)')",
            "g": '"it\'s"',
            "h": "<Kind.A: 0>",
            "i": "''",
        },
        True,
    )


def test_a_dict_is_read_too() -> None:
    assert parse_arguments("'a': 'x', 'b': [1, 2]}") == ({"a": "'x'", "b": "[1, 2]"}, True)


def test_a_list_that_is_cut_off_is_not_whole() -> None:
    assert parse_arguments("a=1, b=[1, 2], c='abc") == ({"a": "1", "b": "[1, 2]"}, False)
    assert parse_arguments("a=1, b=12") == ({"a": "1"}, False)
    assert parse_arguments("a=1) and more") == ({"a": "1"}, False)
    assert parse_arguments("") == ({}, False)


def test_differences_leave_out_what_differs_anyway() -> None:
    servers = [{"a": "1", "port": "1"}, {"a": "2", "port": "2"}, {"a": "2", "port": "3", "b": "0"}]
    assert differing_arguments(servers) == [("a", ("1", "2", "2")), ("b", ("not stated", "not stated", "0"))]
    assert differing_arguments([]) == []
