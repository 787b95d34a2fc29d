"""Reads sources row by row, in bounded memory: JSONL, JSON, Parquet, folders of them, Hugging Face datasets.

A row that cannot be used comes out as `Skipped`, at its place and with its reason; it never ends the reading.
"""

import io
import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq

from draftsmith.core.atomic import sha256_file, sha256_json
from draftsmith.core.config import DEFAULT_ROLES, SourceConfig
from draftsmith.core.conversations import Conversation, Skipped
from draftsmith.core.damage import reading
from draftsmith.core.errors import UserError
from draftsmith.core.shapes import RowContext, to_conversation

DEMO = "demo-prompts"
HUB = "hf:"
_LINES = (".jsonl", ".ndjson")
_KINDS = (*_LINES, ".json", ".parquet")
_PACKED = (".gz", ".zst")
_CHUNK = 1 << 20
_PARQUET_ROWS = 256
_BETWEEN = (" ", "\t", "\r", "\n", ",")

# Where a row stands, what names it in a made-up id, and the row; Skipped where it could not even be parsed.
_Raw = tuple[str, str, Any]


def read_conversations(
    source: SourceConfig | str,
    name: str | None = None,
    roles: Mapping[str, str] = DEFAULT_ROLES,
    shapes: Counter[str] | None = None,
    replies_dropped: bool = False,
) -> Iterator[Conversation | Skipped]:
    """Every row of a source, as a conversation or as the reason why it is none.

    Args:
        source: as in `data.sources`, or just its path.
        name: of the source, in samples and in made-up ids; None: made from the path.
        roles: role names, as in `data.roles`.
        shapes: counts the rows of each shape.
        replies_dropped: the target answers every turn anew, so that no reply of the source has to be usable.

    Raises:
        UserError: there is no such source, or a file of it is damaged.
    """
    source = SourceConfig(path=source) if isinstance(source, str) else source
    name = name or source_name(source.path)
    context = RowContext(name, roles, source.author, replies_dropped)
    for place, key, row in _rows(source):
        if isinstance(row, Skipped):
            yield Skipped(place, row.reason, row.detail, name)
            continue
        shape, read = to_conversation(row, context, f"{name}-{key}", place)
        if shapes is not None and shape:
            shapes[shape] += 1
        yield read


def source_name(path: str) -> str:
    """What a source is called in samples: its file's or data set's own name."""
    if path == DEMO:
        return DEMO
    return _stem(Path(path.removeprefix(HUB).rstrip("/")))


def fingerprint(source: SourceConfig | str) -> str | None:
    """Hex SHA-256 of a source's files; None for a data set on the hub, which its commit pins (`revisions.py`).

    Raises:
        UserError: there is no such source.
    """
    path = source if isinstance(source, str) else source.path
    if is_hub(path):
        return None
    found = files_of(path.removeprefix(HUB))
    root = Path(path.removeprefix(HUB)).expanduser()
    if not root.is_dir():
        return sha256_file(found[0])
    return sha256_json([[str(f.relative_to(root)), sha256_file(f)] for f in found])


def _rows(source: SourceConfig) -> Iterator[_Raw]:
    if source.path.startswith(HUB) or is_hub(source.path):
        yield from _hub_rows(source)
        return
    root = Path(source.path).expanduser()
    for file in files_of(source.path):
        # Two files of a folder may share a stem, and made-up ids must not.
        prefix = "-".join((*file.relative_to(root).parent.parts, _stem(file), "")) if root.is_dir() else ""
        kind = _kind(file)
        if kind == ".parquet":
            rows = _parquet(file)
        elif kind == ".json" and (start := _json_kind(file)) != "lines":
            rows = _array(file) if start == "array" else _document(file)
        else:
            rows = _lines(file)
        for place, key, row in rows:
            yield place, prefix + key, row


def files_of(path: str) -> list[Path]:
    """Files of a source, in an order that only their names decide; `demo-prompts` is the package's own.

    Raises:
        UserError: there are none.
    """
    if path == DEMO:
        return [Path(str(files("draftsmith.data").joinpath("prompts/demo.jsonl")))]
    place = Path(path).expanduser()
    if place.is_dir():
        found = sorted(f for f in place.rglob("*") if f.is_file() and _kind(f) in _KINDS and not _hidden(f, place))
        if not found:
            raise UserError(
                f"data source `{path}`: the folder holds no {', '.join(_KINDS)} file.",
                "Check data.sources / eval.sets.",
            )
        return found
    if not place.is_file():
        raise UserError(
            f"data source `{path}`: no such file or folder, and no Hugging Face data set (hf:owner/name).",
            f"Check data.sources / eval.sets, or use the embedded `{DEMO}`.",
        )
    return [place]


def _hidden(file: Path, folder: Path) -> bool:
    return any(part.startswith(".") for part in file.relative_to(folder).parts)


def _stem(file: Path) -> str:
    name = file.name
    for suffix in (*_PACKED, *_KINDS):
        name = name.removesuffix(suffix)
    return name or file.name


def _kind(file: Path) -> str:
    suffixes = [s.lower() for s in file.suffixes if s.lower() not in _PACKED]
    return suffixes[-1] if suffixes else ""


def _open(file: Path) -> BinaryIO:
    """The file's bytes, unpacked where its name says .gz or .zst."""
    if file.suffix.lower() in _PACKED:
        unpacked: Any = pa.input_stream(str(file), compression="detect")
        return io.BufferedReader(unpacked, _CHUNK)
    return file.open("rb", buffering=_CHUNK)


def _lines(file: Path) -> Iterator[_Raw]:
    with reading(file, "Mend or replace the file."), _open(file) as lines:
        for number, line in enumerate(lines, 1):
            if number == 1:
                line = line.removeprefix(b"\xef\xbb\xbf")
            if not line.strip():
                continue
            place = f"{file}, line {number}"
            yield place, f"{number:07d}", _parse(line, place)


def _parse(line: bytes, place: str) -> Any:
    try:
        return json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        return Skipped(place, "not_utf8", f"byte {error.start} of the line: {error.reason}")
    except (ValueError, RecursionError) as error:
        return Skipped(place, "not_json", str(error))


def _json_kind(file: Path) -> str:
    """`array`, `lines` (many files called .json hold an object a line) or `document`, by how a .json file begins."""
    with reading(file, "Mend or replace the file."), _open(file) as data:
        if data.read(_CHUNK).removeprefix(b"\xef\xbb\xbf").lstrip()[:1] == b"[":
            return "array"  # possibly all of it on one line
    with _open(file) as data:
        line = next((line for line in data if line.strip()), b"").removeprefix(b"\xef\xbb\xbf")
        return "lines" if not line or not isinstance(_parse(line, ""), Skipped) else "document"


def _document(file: Path) -> Iterator[_Raw]:
    """The one row of a .json file that is an object over many lines."""
    with reading(file, "Mend or replace the file."), _open(file) as data:
        yield str(file), "0000001", _parse(data.read(), str(file))


def _array(file: Path) -> Iterator[_Raw]:
    """Elements of one JSON array, parsed as they arrive: the file may be larger than memory."""
    decoder, number, at, problem = json.JSONDecoder(), 1, 0, "the file ends within the array"
    damaged = reading(file, "Mend the file, or write it as JSONL (an object a line).")
    with damaged, io.TextIOWrapper(_open(file), encoding="utf-8-sig") as data:
        text = data.read(_CHUNK).lstrip()[1:]
        while True:
            while text[at : at + 1] in _BETWEEN:
                at += 1
            if text[at : at + 1] == "]":
                return
            try:
                row, end = decoder.raw_decode(text, at)
            except ValueError as error:
                end, problem = len(text), str(error)
            if end < len(text):
                yield f"{file}, element {number}", f"{number:07d}", row
                at, number = end, number + 1
                continue
            # The element may go on in the next chunk; doubling keeps a huge one from being parsed again and again.
            more = data.read(max(_CHUNK, len(text) - at))
            if not more:
                raise UserError(
                    f"{file}, element {number}: not valid JSON ({problem}).",
                    "Mend the file, or write it as JSONL (an object a line).",
                )
            text, at = text[at:] + more, 0


def _parquet(file: Path) -> Iterator[_Raw]:
    number = 0
    with reading(file, "Write the Parquet file again."), pq.ParquetFile(file) as table:
        for batch in table.iter_batches(batch_size=_PARQUET_ROWS):
            for row in batch.to_pylist():
                number += 1
                yield f"{file}, row {number}", f"{number:07d}", row


def is_hub(path: str) -> bool:
    """Whether a path means a data set on the Hugging Face hub: hf:owner/name, or owner/name that is no local path."""
    if path.startswith(HUB):
        return not Path(path.removeprefix(HUB)).exists()
    looks_like_one = re.fullmatch(r"[\w.-]+/[\w.-]+", path) and _kind(Path(path)) not in _KINDS
    return bool(looks_like_one) and not Path(path).exists()


def _hub_rows(source: SourceConfig) -> Iterator[_Raw]:
    name = source.path.removeprefix(HUB)
    try:
        import datasets

        datasets.disable_progress_bars()
        rows = datasets.load_dataset(
            name, source.subset, split=source.split, revision=source.revision, streaming=source.streaming
        )
        for number, row in enumerate(rows, 1):
            yield f"{HUB}{name}[{source.split}], row {number}", f"{number:07d}", row
    except Exception as error:  # the library raises many unrelated types
        reason = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
        raise UserError(
            f"data source `{source.path}` (split `{source.split}`): the data set could not be read: {reason}.",
            "Check its name, split, subset and revision, the network and your access to the hub; "
            "or download it and give the folder.",
        ) from None
