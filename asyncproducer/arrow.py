"""Arrow tables as rows for the record path. The only importer of pyarrow, which is optional.

Types are checked on the schema, before anything is sent. Columns become what core/bulk.py
reads: offsets and bytes, 64-bit integers. Text and binary columns are taken where they lie;
views, dictionaries and fixed sizes are converted first, block by block.
"""

from __future__ import annotations

from collections.abc import AsyncIterable, Iterable, Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Literal, NoReturn, Protocol, TypeAlias

from asyncproducer.core.bulk import (
    Column,
    HeaderColumn,
    Numbers,
    Table,
    Validity,
    murmur2_rows,
    not_text,
)
from asyncproducer.errors import SerializationError

if TYPE_CHECKING:
    import pyarrow

__all__ = [
    "ArrowArray",
    "ArrowStream",
    "ArrowTable",
    "ArrowTables",
    "Columns",
    "Reader",
    "errors_table",
    "murmur2_of",
    "open_table",
]


class ArrowStream(Protocol):
    """What has Arrow's C stream interface: a table of pyarrow, polars or pandas, a reader."""

    def __arrow_c_stream__(self, requested_schema: Any = None) -> Any: ...


class ArrowArray(Protocol):
    """What has Arrow's C array interface: record batches."""

    def __arrow_c_array__(self, requested_schema: Any = None) -> Any: ...


ArrowTable: TypeAlias = ArrowStream | ArrowArray

#: What `send_table` takes: a table, or tables as they come.
ArrowTables: TypeAlias = ArrowTable | AsyncIterable[ArrowTable]

#: A pyarrow.RecordBatchReader.
Reader: TypeAlias = Any


#: So many rows are prepared at a time, and counted together when they have their end.
_BLOCK_ROWS = 65_536

_MOST_SECONDS = (2**63 - 1) // 1000

_BYTES = "binary or text"
_HEADERS = "list<struct<name: text, value: binary>>, or map<text, binary>"


def _pyarrow() -> Any:
    try:
        import pyarrow
    except ImportError as error:
        raise ImportError(
            f'send_table needs pyarrow ({error}): pip install "asyncproducer[arrow]"'
        ) from error
    return pyarrow


def open_table(table: Any) -> pyarrow.RecordBatchReader:
    """Whatever holds Arrow data, as a reader of record batches. Raises TypeError for others."""
    pa = _pyarrow()
    if isinstance(table, pa.RecordBatchReader):
        return table
    if isinstance(table, pa.Table):
        return pa.RecordBatchReader.from_batches(table.schema, table.to_batches())
    if hasattr(table, "__arrow_c_stream__"):
        return pa.RecordBatchReader.from_stream(table)
    if hasattr(table, "__arrow_c_array__"):
        batch = pa.record_batch(table)
        return pa.RecordBatchReader.from_batches(batch.schema, [batch])
    raise TypeError(
        f"table is of type {type(table).__name__}: give a pyarrow Table, RecordBatch or "
        "RecordBatchReader, or an object with __arrow_c_stream__ or __arrow_c_array__ "
        "(polars, pandas >= 2.2, duckdb)"
    )


class Columns:
    """Which columns of a schema are the parts of a record. Raises SerializationError."""

    def __init__(
        self,
        schema: pyarrow.Schema,
        topic: str | None,
        *,
        topic_column: str | None,
        key: str | None,
        value: str | None,
        headers: str | None,
        partition: str | None,
        timestamp: str | None,
    ) -> None:
        pa = _pyarrow()
        self._topic = topic
        self._schema = schema
        #: The last one that was found to have the same columns.
        self._like = schema
        types = pa.types
        self._names = self._find(topic_column, "topic", _is_text, "text")
        self._keys = self._find(key, "key", _is_bytes, _BYTES)
        self._values = self._find(value, "value", _is_bytes, _BYTES)
        self._headers = self._find(headers, "headers", _is_headers, _HEADERS)
        self._partitions = self._find(partition, "partition", types.is_integer, "an integer")
        self._timestamps = self._find(
            timestamp,
            "timestamp",
            lambda t: types.is_integer(t) or types.is_timestamp(t),
            "a timestamp, or an integer (ms since 1970)",
        )

    def _find(self, name: str | None, part: str, fits: Any, wanted: str) -> int:
        """The index of a column; -1 where none is wanted."""
        if name is None:
            return -1
        if not isinstance(name, str):
            raise TypeError(f"{part}={name!r}: give the name of a column, or None")
        found = self._schema.get_all_field_indices(name)
        if len(found) != 1:
            raise SerializationError(
                f"{part}={name!r}: the table has {len(found) or 'no'} such column"
                f"{'s' * (len(found) > 1)}, only {', '.join(map(repr, self._schema.names))}"
            )
        given = self._schema.field(found[0]).type
        if not fits(_stored(given)) and not _pyarrow().types.is_null(given):
            advice = "cast it, or serialize it into a column of its own"
            raise SerializationError(
                f"{part}={name!r}: the column is of type {given}, it must be {wanted}: {advice}"
            )
        return int(found[0])

    def tables(self, reader: pyarrow.RecordBatchReader) -> Iterator[Table]:
        """The rows of a reader, block by block.

        Raises SerializationError for damaged ones, and where the columns are not those of ours.
        """
        if not self._are_in(reader.schema):
            raise SerializationError(
                "all tables of an iterable have the same columns: the first has "
                f"{_shown(self._schema)}, this one {_shown(reader.schema)}"
            )
        for batch in reader:
            # A reader does not look at what it is made from, and columns are taken by their number.
            if not self._are_in(batch.schema):
                raise SerializationError(
                    "all batches of a reader have the columns of its schema: that has "
                    f"{_shown(self._schema)}, this batch {_shown(batch.schema)}; bring them into "
                    "its order with batch.select(schema.names), and to its types with "
                    "batch.cast(schema)"
                )
            if not batch.num_rows:
                # To make it may have taken its time all the same.
                yield Table(0, topic=self._topic, keys=None, values=None)
            for start in range(0, batch.num_rows, _BLOCK_ROWS):
                yield self._table(batch.slice(start, _BLOCK_ROWS))

    def _are_in(self, schema: pyarrow.Schema) -> bool:
        """Whether a schema has the columns of ours, by name and type, and in their order.

        Whatever it says of nulls: each array has its own. Nothing but them is of a type of its
        own where pandas has guessed it.
        """
        if schema is not self._like and not schema.equals(self._like):
            if schema.names != self._schema.names:
                return False
            for field, ours in zip(schema, self._schema, strict=True):
                if _type(field) != _type(ours) and not _pyarrow().types.is_null(field.type):
                    return False
            self._like = schema
        return True

    def _table(self, batch: pyarrow.RecordBatch) -> Table:
        names: list[Any] = []
        topics = None
        if self._names >= 0:
            topics, names = self._part(batch, self._names, _topics) or (None, [])
        return Table(
            batch.num_rows,
            topic=self._topic,
            keys=self._part(batch, self._keys, _column),
            values=self._part(batch, self._values, _column),
            headers=self._part(batch, self._headers, _header_column),
            partitions=self._part(batch, self._partitions, _integers),
            timestamps=self._part(batch, self._timestamps, _milliseconds),
            topics=topics,
            names=names,
        )

    def _part(self, batch: pyarrow.RecordBatch, index: int, convert: Any) -> Any:
        """A column as `convert` makes it; None where there is none, or nothing but nulls."""
        if index < 0:
            return None
        array = _storage(batch.column(index))
        pa = _pyarrow()
        if pa.types.is_null(array.type):
            return None
        try:
            # Does each buffer have what its length asks for? pyarrow would read on behind it.
            array.validate()
            return convert(array)
        except pa.ArrowException as error:
            self._unreadable(index, error)

    def _unreadable(self, index: int, error: Exception) -> NoReturn:
        field = self._schema.field(index)
        raise SerializationError(
            f"the column {field.name!r} of type {field.type} cannot be read: {error}"
        ) from error


def _shown(schema: Any) -> str:
    return ", ".join(f"{field.name}: {_type(field)}" for field in schema)


def _type(field: Any) -> str:
    """Without what a nested type says of nulls."""
    return str(field.type).replace(" not null", "")


# -- types ---------------------------------------------------------------------------------


def _stored(given: Any) -> Any:
    """How a type is stored: that of an extension type, or of a dictionary's values."""
    pa = _pyarrow()
    if isinstance(given, pa.BaseExtensionType):
        return _stored(given.storage_type)
    return _stored(given.value_type) if pa.types.is_dictionary(given) else given


def _is_text(given: Any) -> bool:
    types = _pyarrow().types
    return bool(
        types.is_string(given) or types.is_large_string(given) or types.is_string_view(given)
    )


def _is_bytes(given: Any) -> bool:
    types = _pyarrow().types
    return (
        types.is_binary(given)
        or types.is_large_binary(given)
        or types.is_binary_view(given)
        or types.is_fixed_size_binary(given)
        or _is_text(given)
    )


def _is_headers(given: Any) -> bool:
    types = _pyarrow().types
    if types.is_map(given):
        name, value = given.key_type, given.item_type
    elif types.is_list(given) or types.is_large_list(given):
        pair = given.value_type
        if not types.is_struct(pair) or pair.num_fields != 2:
            return False
        name, value = pair.field(0).type, pair.field(1).type
    else:
        return False
    name, value = _stored(name), _stored(value)
    return (_is_text(name) or types.is_null(name)) and (_is_bytes(value) or types.is_null(value))


# -- arrays --------------------------------------------------------------------------------


def _storage(array: Any) -> Any:
    return array.storage if isinstance(array.type, _pyarrow().BaseExtensionType) else array


def _memory(buffer: Any, code: Literal["B", "i", "q"]) -> memoryview:
    """A buffer as so many integers as are whole in it."""
    view = memoryview(b"" if buffer is None else buffer).cast("B")
    width = {"B": 1, "i": 4, "q": 8}[code]
    return view[: len(view) // width * width].cast(code)


def _validity(array: Any) -> Validity:
    bitmap = array.buffers()[0] if array.null_count else None
    return Validity(None if bitmap is None else _memory(bitmap, "B"), array.offset)


def _column(array: Any) -> Column:
    """Binary or text."""
    pa = _pyarrow()
    types = pa.types
    if types.is_dictionary(array.type):
        array = _taken(array)
    plain = (types.is_binary, types.is_string, types.is_large_binary, types.is_large_string)
    if not any(kind(array.type) for kind in plain):
        array = array.cast(pa.large_binary())
    wide = types.is_large_binary(array.type) or types.is_large_string(array.type)
    _, offsets, data = array.buffers()
    return Column(
        _memory(offsets, "q" if wide else "i"), array.offset, _validity(array), _memory(data, "B")
    )


def _taken(array: Any) -> Any:
    """A dictionary's texts or bytes, row by row.

    Before they are converted: each block has the whole dictionary, which may be far larger.
    """
    pa = _pyarrow()
    texts = _storage(array.dictionary)
    if pa.types.is_string_view(texts.type) or pa.types.is_binary_view(texts.type):
        # Of views pyarrow takes none. Each is 16 bytes, which say where in the other buffers it is.
        validity, views, *data = texts.buffers()
        views = pa.Array.from_buffers(
            pa.binary(16), len(texts), [validity, views], offset=texts.offset
        ).take(array.indices)
        return pa.Array.from_buffers(texts.type, len(views), [*views.buffers(), *data])
    try:
        return texts.take(array.indices)
    except pa.ArrowInvalid:  # more than 2 GiB: they need wide offsets
        wide = pa.large_string() if _is_text(texts.type) else pa.large_binary()
        return texts.cast(wide).take(array.indices)


def _integers(array: Any) -> Numbers:
    # What has more than 63 bits becomes negative, and is refused as a row.
    array = array.cast(_pyarrow().int64(), safe=False)
    return Numbers(_memory(array.buffers()[1], "q"), array.offset, _validity(array))


def _milliseconds(array: Any) -> Numbers:
    pa = _pyarrow()
    if pa.types.is_dictionary(array.type):
        array = _storage(array.dictionary).take(array.indices)
    if pa.types.is_timestamp(array.type) and array.type.unit != "ms":
        # Not safe: microseconds and nanoseconds are cut off. Of seconds there is nothing to cut.
        seconds = array.type.unit == "s"
        try:
            array = array.cast(pa.timestamp("ms", tz=array.type.tz), safe=seconds)
        except pa.ArrowInvalid:  # one is too large
            array = pa.array([_of_seconds(s.value) for s in array], pa.int64())
    return _integers(array)


def _of_seconds(seconds: int | None) -> int | None:
    """In milliseconds. What 64 bits cannot hold becomes negative, and is refused as a row."""
    if seconds is None or abs(seconds) <= _MOST_SECONDS:
        return seconds and seconds * 1000
    return -(2**63)


def _topics(array: Any) -> tuple[Numbers, list[Any]]:
    """Indexes of names, and the names."""
    pa = _pyarrow()
    if pa.types.is_dictionary(array.type) and len(array.dictionary) > len(array):
        # Of a name that no row has there is no object to be made.
        with suppress(IndexError):  # where one is wrong, it is that row that is refused
            array = _taken(array)
    if not pa.types.is_dictionary(array.type):
        array = array.cast(pa.large_string()).dictionary_encode()
    try:
        names = _storage(array.dictionary).cast(pa.large_string()).to_pylist()
    except UnicodeDecodeError as error:
        raise not_text("a topic's name", error) from error
    return _integers(array.indices), names


def _header_column(array: Any) -> HeaderColumn:
    types = _pyarrow().types
    _, offsets, *_ = array.buffers()
    # Of the pairs, only those of this block: the child array has those of all blocks.
    bounds = _memory(offsets, "q" if types.is_large_list(array.type) else "i")
    skipped, end = bounds[array.offset], bounds[array.offset + len(array)]
    pairs = array.values
    lists = Column(bounds, array.offset, _validity(array), None, len(pairs))
    pairs = pairs.slice(skipped, end - skipped)
    names, values = (
        None if types.is_null(child.type) else _column(child)
        for child in (_storage(pairs.field(0)), _storage(pairs.field(1)))
    )
    return HeaderColumn(lists, skipped, _validity(pairs), names, values)


def murmur2_of(array: pyarrow.Array) -> memoryview:
    """Kafka's murmur2 of each row of a binary or text array, as 64-bit integers; 0 for null."""
    return memoryview(murmur2_rows(_column(_storage(array)), len(array)))


def errors_table(errors: Iterable[tuple[int, Exception, Any, Any]]) -> Any:
    """(row, exception, topic, partition) as a pyarrow.Table, see TableResult.errors_table."""
    pa = _pyarrow()
    columns: dict[str, tuple[Any, list[Any]]] = {
        "row": (pa.int64(), []),
        "topic": (pa.string(), []),
        "partition": (pa.int64(), []),
        "error": (pa.string(), []),
        "message": (pa.string(), []),
        "persisted": (pa.string(), []),
    }
    for row, error, topic, partition in errors:
        persisted = getattr(error, "persisted", "no")
        found = (row, topic, partition, type(error).__name__, str(error), persisted)
        for (_, values), item in zip(columns.values(), found, strict=True):
            values.append(item)
    return pa.table({name: pa.array(values, kind) for name, (kind, values) in columns.items()})
