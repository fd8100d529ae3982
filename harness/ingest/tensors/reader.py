"""The contents of a dump of tensors: `assay ingest` on a folder of tensor files, or one such file."""

from __future__ import annotations

from collections import Counter

from assay.harness.ingest.result import Fact, FactTable, FileDocument, FileRead, FormatReader
from assay.harness.ingest.source_file import SourceFile
from assay.harness.ingest.tensors.dump import TITLES, Dump, format_of, open_dump, tensor_files
from assay.harness.ingest.tensors.numpy_files import MAGIC
from assay.harness.text import ranges

_ZIP = b"PK\x03\x04"


def _recognises(source: SourceFile) -> bool:
    """Recognise a folder whose first tensor file is one, or a file that begins as safetensors, PyTorch's zip or NumPy's."""
    if source.path.is_dir():
        return bool(format_of(tensor_files(source.path)))
    length = int.from_bytes(source.head[:8], "little")
    safetensors = length < 100 << 20 and source.head[8:9] == b"{" and b'"data_offsets"' in source.head
    zipped = source.head.startswith(_ZIP) and (b"data.pkl" in source.head or MAGIC in source.head)
    return safetensors or zipped or source.head.startswith(MAGIC)


def _read(source: SourceFile) -> FileDocument:
    """List its tensors. None of them is loaded.

    Raises:
        EvidenceError: not one file can be read.
    """
    dump = open_dump(source.path)
    kind, refused = dump.format, dump.refused
    file = FileRead.of(
        source, f"tensors-{kind}", TITLES[kind], len(dump.tensors), len(refused), "tensor", notes=refused[:5]
    )
    return FileDocument(file=file, facts=tuple(_facts(dump)), tables=(_table(dump),))


def _facts(dump: Dump) -> list[Fact]:
    layers = {tensor.place.layer for tensor in dump.tensors if tensor.place.layer is not None}
    passes = {tensor.place.step for tensor in dump.tensors}
    says = f"{len(dump.tensors):,} tensors, {dump.bytes / 1e6:,.1f} MB, {len(passes):,} passes or calls"
    return [
        Fact(id="tensors", title="Tensors", text=says),
        Fact(id="layers", title="Layers", text=ranges(layers)),
        Fact(
            id="next", title="What to do with it",
            text="assay tensors diff A B names the first difference of two dumps",
        ),
    ]  # fmt: skip


def _table(dump: Dump) -> FactTable:
    counts = Counter(tensor.place.boundary for tensor in dump.tensors)
    rows = tuple((boundary, f"{count:,}") for boundary, count in counts.most_common())
    return FactTable(id="boundaries", title="Tensors by boundary", columns=("boundary", "tensors"), rows=rows)


READER = FormatReader("tensors", "tensor dump", _recognises, _read)
