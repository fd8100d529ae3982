from __future__ import annotations

from typing import Any

import pytest

from assay.harness.ingest.asked import Asked, arguments_of, differences, flat

TASK = {"shots": 0, "version": 1, "tokenizer": "tok", "template": "t", "dataset_path": "org/gsm8k"}
GENERATION = {"temperature": 0, "top_p": 1}


def asked(**more: Any) -> Asked:
    return Asked.of("org/m", "dtype=auto,max_length=4096", task=TASK, generation=GENERATION, limits={"limit": "none"}).model_copy(
        update={name: flat(value) for name, value in more.items()}
    )


@pytest.mark.parametrize(
    "same",
    [
        {"generation": {"temperature": 0.0, "top_p": "1.0"}},
        {"generation": GENERATION | {"do_sample": False, "stop": None}},
        {"task": TASK | {"dataset_path": "/data/hub/gsm8k"}},
        {"task": TASK | {"dataset_path": "/cache/hub/datasets--org--gsm8k/snapshots/0f3a"}},
        {"task": TASK | {"version": "1.0", "tokenizer": "./models/tok"}},
    ],
)
def test_one_value_written_otherwise_and_a_local_copy_are_no_difference(same: dict[str, Any]) -> None:
    assert differences(asked(), asked(**same)) == ((), (), (), ())


def test_documents_that_are_compared_themselves_may_come_from_any_file() -> None:
    local = asked(task=TASK | {"dataset_path": "json", "dataset_kwargs": {"data_files": "/data/test.jsonl"}})
    assert differences(asked(), local).other
    assert not differences(asked(), local, prompts=True).other


def test_what_one_side_does_not_record_is_unknown_and_prompts_show_what_shaped_them() -> None:
    unstated = asked(task={name: value for name, value in TASK.items() if name != "shots"})
    assert differences(asked(), unstated).unrecorded == ("B",)
    assert differences(asked(), unstated, prompts=True).unrecorded == ()
    assert differences(asked(task={}), asked(), prompts=True).unrecorded == ("A",)
    assert differences(asked(task={}), asked(task={})).unrecorded == ("A", "B")
    partly = differences(asked(task={}, generation={"temperature": 1}), asked())
    assert [other.values["setting"] for other in partly.other] == ["temperature"], "what both record is compared"


def test_arguments_of_a_model_are_told_apart_by_what_they_decide() -> None:
    given = (
        "pretrained=org/m,quantization=fp8,max_model_len=512,enable_thinking=True,num_concurrent=8,api_key=sk,stop=a,b,trust=None"
    )
    made = Asked.of("m", given)
    assert made.served == {"model": "m", "pretrained": "org/m", "quantization": "fp8", "stop": "a,b"}
    assert (made.limits, made.generation) == ({"max_model_len": "512"}, {"enable_thinking": "True"})
    assert Asked.of("m", arguments_of(given)) == made
    changed = differences(Asked.of("m", "quantization=fp8"), Asked.of("n"))
    assert changed.changed == (("model", "m", "n"), ("quantization", "fp8", None))
    assert (changed.other, changed.limits) == ((), ())
    (limit,) = differences(Asked.of("m", "max_length=4096"), made).limits[:1]
    assert limit.values == {"what": "max_length", "a": "4096", "b": None}
