"""Findings and decisions, as an id and values. `assay.reports.wording` says each id in a single place."""

from __future__ import annotations

import math
from typing import Any, ClassVar

from pydantic import (
    Field,
    GetJsonSchemaHandler,
    SerializationInfo,
    SerializerFunctionWrapHandler,
    field_serializer,
    field_validator,
    model_serializer,
    model_validator,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from assay.harness.schema import Part

WORDS = "words"
"""Key of the context of a serialization: a function that returns the words of a `Worded`, by key."""


class Worded(Part):
    """Base of a part of a result that holds numbers and ids, and is shown as text.

    JSON that is written with a function under `WORDS` in its context holds the text too. Reading drops it, because it follows from
    the rest.
    """

    words: ClassVar[tuple[str, ...]]
    """The keys of the text in JSON."""

    @classmethod
    def __get_pydantic_json_schema__(cls, core: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        """Describe the fields, which the serializer would hide, and the text."""
        schema = handler.resolve_ref_schema(handler(_without_serializer(core)))
        for key in cls.words:
            text = {"items": {"type": "string"}, "type": "array"} if key == "reasons" else {"type": "string"}
            schema["properties"][key] = {"description": "text, which follows from the rest", **text}
        return schema

    @model_serializer(mode="wrap")
    def _with_words(self, dump: SerializerFunctionWrapHandler, info: SerializationInfo) -> dict[str, Any]:
        words = (info.context or {}).get(WORDS)
        return {**dump(self), **(words(self) if words else {})}

    @model_validator(mode="before")
    @classmethod
    def _without_words(cls, data: Any) -> Any:
        return {key: value for key, value in data.items() if key not in cls.words} if isinstance(data, dict) else data


def _without_serializer(core: Any) -> Any:
    kept = {key: value for key, value in core.items() if key != "serialization"}
    return kept | {"schema": _without_serializer(core["schema"])} if "schema" in core else kept


class Statement(Worded):
    """A finding, or the reason for a decision: an id, and the values that its sentence states."""

    words: ClassVar[tuple[str, ...]] = ("text",)

    id: str = Field(description='stable, such as "all-answered"')
    values: dict[str, Any] = Field(
        {}, description='numbers, texts, statements, and lists of them; {"float": "inf"} is not finite'
    )

    @field_validator("values", mode="before")
    @classmethod
    def _as_read(cls, values: Any) -> Any:
        return {name: _as_read(value) for name, value in values.items()} if isinstance(values, dict) else values

    @field_serializer("values")
    def _as_written(self, values: dict[str, Any]) -> dict[str, Any]:
        return {name: _as_written(value) for name, value in values.items()}


def state(id: str, /, **values: Any) -> Statement:
    """Make a statement. The function of `assay.reports.wording` whose name is its id says it, with these arguments."""
    return Statement(id=id, values=values)


def _as_read(value: Any) -> Any:
    """Return a value as JSON gives it back: a list for a tuple, a plain number for numpy's, text that can be written."""
    if isinstance(value, dict):
        return float(value["float"]) if value.keys() == {"float"} else Statement.model_validate(value)
    if isinstance(value, (list, tuple)):
        return [_as_read(each) for each in value]
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    return value.item() if hasattr(value, "item") else value


def _as_written(value: Any) -> Any:
    if isinstance(value, list):
        return [_as_written(each) for each in value]
    if isinstance(value, Statement):
        return {"id": value.id, "values": {name: _as_written(each) for name, each in value.values.items()}}
    return {"float": str(value)} if isinstance(value, float) and not math.isfinite(value) else value
