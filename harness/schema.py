"""Everything written to disk as JSON: its base classes, how it is read, and the versioning rule of its schemas."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError, field_validator

from assay.harness.errors import EvidenceError
from assay.harness.reading import reading, whole_file

_Document = TypeVar("_Document", bound=BaseModel)

RULE = (
    "A schema's name ends in its version. Within one version, ids and fields with a default may be added, and titles and other "
    "prose may change; no field is removed, renamed or given another meaning, and no id changes. Anything else raises the "
    "version. A later assay reads all documents of a version; an earlier one may refuse fields that it does not know."
)
"""Changes that a document may undergo without a new schema version, for every schema of this package, from packs to reports."""


def page_in_notebook(result: BaseModel) -> str | None:
    """Return the page that shows a result in a notebook, or None for a part of a result, which has none.

    Reports lie above the records that they show, so they are imported by name.
    """
    page: str | None = import_module("assay.reports.notebook").page(result)
    return page


class Record(BaseModel):
    """Base of everything that is written to disk: unknown keys are an error, and values do not change."""

    # Log-probabilities of a broken kernel may be NaN, and must be read back as such. The alias is that of `schema_id`.
    model_config = ConfigDict(
        extra="forbid", frozen=True, ser_json_inf_nan="constants", populate_by_name=True, serialize_by_alias=True
    )

    @field_validator("*", mode="before")
    @classmethod
    def _encodable(cls, value: Any) -> Any:
        """Replace lone surrogates: a model's text may hold them, and no file can."""
        if isinstance(value, str):
            return value if value.isascii() else value.encode("utf-8", "replace").decode()
        return type(value)(map(cls._encodable, value)) if type(value) in (list, tuple) else value


class Part(Record):
    """Base of every part of a result: plain JSON, where a number that is not finite becomes null."""

    model_config = ConfigDict(extra="forbid", frozen=True, ser_json_inf_nan="null")


def read_json(path: Path, kind: type[_Document], do: str) -> _Document:
    """Read a document of a run or a tool.

    Args:
        path: its file.
        kind: type of its content.
        do: what the user can do if it is damaged.

    Raises:
        EvidenceError: the file is missing or damaged.
    """
    with reading(path, "document of assay"):
        return _read_json(path, kind, do)


def _read_json(path: Path, kind: type[_Document], do: str) -> _Document:
    try:
        return kind.model_validate_json(whole_file(path))
    except OSError as error:
        damage = f"{path} cannot be read: {error.strerror}."
    except ValidationError as error:
        # Another version's schema explains all other faults.
        first = min(error.errors(include_url=False), key=lambda each: each["loc"] != ("schema",))
        where = ".".join(map(str, first["loc"]))
        lacks = first["type"] == "missing"
        damage = (
            f"{path} is damaged: it has no {where}."
            if lacks
            else f"{path} is damaged{f' at {where}' if where else ''}: {first['msg']}."
        )
        if where == "schema" and first["type"] == "literal_error":
            damage = f"{path} is of another version of assay, or of another kind: its schema is {first['input']!r}."
            raise EvidenceError(damage, f"schema {first['ctx']['expected']}", do) from None
    raise EvidenceError(
        damage, "a file as this version of assay writes it; another version's may have other fields", do
    )
