"""Two sides as a list of differences, and the side that has some of them: the reference with these applied."""

from __future__ import annotations

import filecmp
import hashlib
import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from assay.harness.drivers.bisect.sides_task import Difference, Kind
from assay.harness.engines.environments import Interpreter, digest_of, distribution_of
from assay.harness.extras import DISTRIBUTION
from assay.harness.files import write_whole
from assay.harness.reading import whole_file
from assay.harness.sides import Side, flag_values

CONFIG, WEIGHTS = "config.json", "weights"
_OF_WEIGHTS = (".safetensors", ".bin", ".pt", ".gguf", ".index.json")
# Files of a model folder that no engine reads.
_UNREAD = (".md", ".gitattributes", ".gitignore", ".txt.license", "LICENSE")


@dataclass(frozen=True)
class SidePair:
    """Two sides, and what they are made of.

    Attributes:
        reference: its server is known to be right.
        candidate: the side that differs from it.
        models: folders of their models.
        pythons: their Pythons, or None if both have the same.
    """

    reference: Side
    candidate: Side
    models: tuple[Path, Path]
    pythons: tuple[Interpreter, Interpreter] | None = None

    def differences(self) -> list[Difference]:
        """List the differences that can be applied one by one, related ones next to each other."""
        settings = [
            Difference(kind=kind, name=name, before=ours.get(name, ""), after=theirs.get(name, ""))
            for kind, ours, theirs in self._settings()
            for name in sorted(ours.keys() | theirs.keys())
            if ours.get(name, "") != theirs.get(name, "")
        ]
        return [*settings, *self._of_models(), *self._of_pythons()]

    def _settings(self) -> Iterator[tuple[Kind, Mapping[str, str], Mapping[str, str]]]:
        ours, theirs = self.reference, self.candidate
        yield "backend", {"backend": ours.backend}, {"backend": theirs.backend}
        yield "flag", flag_values(ours.flags), flag_values(theirs.flags)
        yield "variable", ours.environment, theirs.environment

    @property
    def _whole_interpreter(self) -> bool:
        """True if packages of one Python do not run in the other."""
        return self.pythons is not None and self.pythons[0].version[:2] != self.pythons[1].version[:2]

    def _of_pythons(self) -> Iterator[Difference]:
        """Yield the packages that the candidate's Python has in another version, or with other content."""
        if self.pythons is None:
            return
        ours, theirs = self.pythons
        if self._whole_interpreter:
            versions = [".".join(map(str, python.version)) for python in self.pythons]
            yield Difference(kind="interpreter", name="Python", before=versions[0], after=versions[1])
            return
        for name, (version, place) in sorted(theirs.packages.items()):
            before, where = ours.packages.get(name, ("", ""))
            same = before == version and (where == place or digest_of(Path(where)) == digest_of(Path(place)))
            if not same and name != DISTRIBUTION:
                yield Difference(kind="package", name=name, before=before, after=version)

    @property
    def left_out(self) -> tuple[str, ...]:
        """Packages that the reference's Python alone has: no environment laid over it can lack them."""
        if self.pythons is None or self._whole_interpreter:
            return ()
        return tuple(sorted(self.pythons[0].packages.keys() - self.pythons[1].packages.keys() - {DISTRIBUTION}))

    def _of_models(self) -> Iterator[Difference]:
        """Yield the settings of ``config.json`` and the files in which the model folders differ."""
        ours, theirs = (_files(folder) for folder in self.models)
        if ours == theirs:
            return
        before, after = (dict(leaves(_config(folder))) for folder in self.models)
        for key in sorted(before.keys() | after.keys()):
            values = [json.dumps(side[key], sort_keys=True) if key in side else "" for side in (before, after)]
            if values[0] != values[1]:
                name = f"{CONFIG}: {'.'.join(key)}"
                yield Difference(kind="config", name=name, before=values[0], after=values[1])
        weights = [{name for name in files if name.endswith(_OF_WEIGHTS)} for files in (ours, theirs)]
        split = weights[0] == weights[1]  # else a file of one shard names tensors of another
        for name in sorted(ours.keys() | theirs.keys()):
            apart = name != CONFIG and (split or name not in weights[0] | weights[1])
            if apart and not _same(ours.get(name), theirs.get(name)):
                yield Difference(kind="file", name=name)
        if not split:
            yield Difference(kind="file", name=WEIGHTS)

    def applied(self, chosen: Collection[Difference], folder: Path) -> Side:
        """Return the reference with some of the differences.

        Args:
            chosen: the differences that are applied.
            folder: where a model folder is made that has files of both, as links.
        """
        names = {kind: {each.name for each in chosen if each.kind == kind} for kind in Kind.__args__}  # type: ignore[attr-defined]
        ours, theirs = self.reference, self.candidate
        return ours.model_copy(
            update={
                "backend": theirs.backend if names["backend"] else ours.backend,
                "flags": _merged(ours.flags, theirs.flags, names["flag"]),
                "environment": {
                    name: side.environment[name]
                    for name in (*ours.environment, *(theirs.environment.keys() - ours.environment.keys()))
                    if name in (side := theirs if name in names["variable"] else ours).environment
                },
                "model": self._model(names["config"], names["file"], folder),
                "interpreter": theirs.interpreter if names["interpreter"] else ours.interpreter,
                "packages": theirs.packages if names["interpreter"] else self._packages(names["package"]),
            }
        )

    def _packages(self, chosen: Collection[str]) -> tuple[str, ...]:
        """Return the reference's packages with some of the candidate's, as it asks for them or as its environment has them."""
        kept = [asked for asked in self.reference.packages if distribution_of(asked) not in chosen]
        asked = {distribution_of(asked): asked for asked in self.candidate.packages}
        there = self.pythons[1].path if self.pythons else ""
        return (*kept, *(asked.get(name, f"{name} @ {there}") for name in sorted(chosen)))

    def _model(self, settings: Collection[str], files: Collection[str], folder: Path) -> str:
        """Return the model with some of the candidate's settings and files; make its folder unless it is one of both."""
        every = {each.name for each in self._of_models()}
        chosen = {*settings, *files}
        if not chosen or chosen == every:
            return self.candidate.model if chosen else self.reference.model
        ours, theirs = (_files(model) for model in self.models)
        weights = [{name for name in side if name.endswith(_OF_WEIGHTS)} for side in (ours, theirs)]
        taken = set(files) | (weights[0] | weights[1] if WEIGHTS in files else set())
        held = {
            name: side[name]
            for name in ours.keys() | theirs.keys()
            if name in (side := theirs if name in taken else ours)
        }
        config, other = (_config(model) for model in self.models)
        for key in {**dict(leaves(config)), **dict(leaves(other))}:
            if f"{CONFIG}: {'.'.join(key)}" in settings:
                _put(config, other, key)
        made = folder / hashlib.sha256("\n".join(sorted(chosen)).encode()).hexdigest()[:12]
        made.mkdir(parents=True, exist_ok=True)
        for name, file in held.items():
            link = made / name
            if name != CONFIG and not link.is_symlink():
                link.symlink_to(file.resolve())
        write_whole(made / CONFIG, json.dumps(config, indent=1))
        return str(made.resolve())


def _merged(ours: Sequence[str], theirs: Sequence[str], chosen: Collection[str]) -> tuple[str, ...]:
    """Return flags of the reference, with those of the candidate in place of the chosen ones."""
    before, after = _by_flag(ours), _by_flag(theirs)
    words = [word for name, said in before.items() if name not in chosen for word in said]
    return (*words, *(word for name, said in after.items() if name in chosen for word in said))


def _by_flag(flags: Sequence[str]) -> dict[str, list[str]]:
    """Return the words of each flag, its own and those of its values."""
    words: dict[str, list[str]] = {}
    last = ""
    for word in flags:
        last = word.partition("=")[0] if word.startswith("-") else last
        words.setdefault(last, []).append(word)
    return words


def _files(folder: Path) -> dict[str, Path]:
    """Return the files of a model folder that an engine reads, by name."""
    return {file.name: file for file in folder.iterdir() if file.is_file() and not file.name.endswith(_UNREAD)}


def _same(ours: Path | None, theirs: Path | None) -> bool:
    return ours is not None and theirs is not None and filecmp.cmp(ours, theirs, shallow=False)


def _config(folder: Path) -> dict[str, Any]:
    read: dict[str, Any] = json.loads(whole_file(folder / CONFIG))
    return read


def leaves(settings: Mapping[str, Any], above: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield the path and the value of each setting that holds no further ones."""
    for name, value in settings.items():
        if isinstance(value, Mapping) and value:
            yield from leaves(value, (*above, name))
        else:
            yield (*above, name), value


def _put(config: dict[str, Any], other: Mapping[str, Any], key: tuple[str, ...]) -> None:
    """Set a setting as another configuration has it; remove it if that has none."""
    for name in key[:-1]:
        inner = config.get(name)
        config[name] = deepcopy(inner) if isinstance(inner, Mapping) else {}
        config, other = config[name], other.get(name) or {}
    if key[-1] in other:
        config[key[-1]] = other[key[-1]]
    else:
        config.pop(key[-1], None)
