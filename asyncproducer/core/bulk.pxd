# C types for bulk.py, and the C functions that its compiled branches use.
cimport cython
from cpython.bytearray cimport PyByteArray_AS_STRING, PyByteArray_Resize
from cpython.bytes cimport PyBytes_FromStringAndSize
from cpython.tuple cimport PyTuple_GET_ITEM

from asyncproducer.core.batch cimport (
    ListedValues,
    ProducerBatch,
    Sizes,
    Values,
    bytes_size,
    put_field,
    put_varint,
)
from asyncproducer.core.delivery cimport Delivery, Outcome
from asyncproducer.core.partitioner cimport hash_octets as hash_at


cdef enum:
    COMPILED = 1
cdef long long _MAX_TIMESTAMP
cdef long long _MAX_PARTITION
cdef Py_ssize_t _RUN
cdef Py_ssize_t _HEADER_OVERHEAD

cdef inline const unsigned char *address(const unsigned char[::1] data) noexcept:
    return &data[0] if data.shape[0] else NULL


# Where the item with this index is; there may be none.
cdef inline const int *ints(const int[::1] data, Py_ssize_t first) noexcept:
    return &data[0] + first if 0 <= first < data.shape[0] else NULL


cdef inline const long long *wide_ints(const long long[::1] data, Py_ssize_t first) noexcept:
    return &data[0] + first if 0 <= first < data.shape[0] else NULL


cdef inline bint is_ascii(const unsigned char *data, Py_ssize_t size) noexcept:
    cdef Py_ssize_t index
    for index in range(size):
        if data[index] >= 0x80:
            return False
    return True


cdef inline const unsigned char *octets(bytearray data) noexcept:
    return <const unsigned char *>PyByteArray_AS_STRING(data)


cdef inline object part(object record, Py_ssize_t index):
    return <object>PyTuple_GET_ITEM(record, index)


cdef inline bytes copied(const unsigned char *data, Py_ssize_t size):
    return PyBytes_FromStringAndSize(<const char *>data, size)


cdef class Rows:
    cdef public Py_ssize_t count
    cdef public long long serial
    cdef public long long now
    cdef public bint abound
    cdef public bint stay
    cdef public Py_ssize_t written
    cdef public object topic
    cdef public Py_ssize_t partition
    cdef public long long timestamp
    cdef public Py_ssize_t key_size
    cdef public Py_ssize_t value_size
    cdef public Py_ssize_t headers_size
    cdef public Py_ssize_t size
    cdef const unsigned char *key
    cdef const unsigned char *value
    cdef const unsigned char *headers
    cdef bytes _key
    cdef bytes _value
    cdef bytes _headers
    cdef public list outcomes
    cdef public list errors
    cdef long long[::1] _runs
    cdef Py_ssize_t _run_end
    cdef Py_ssize_t _ended
    cdef set _seen
    cdef bint _all_seen

    cpdef bint ends(self, Py_ssize_t row) except -1
    cpdef bint read(self, Py_ssize_t row) except -1
    cpdef Py_ssize_t fill(
        self,
        ProducerBatch batch,
        Py_ssize_t row,
        Py_ssize_t end,
        Py_ssize_t limit,
        Py_ssize_t most,
    ) except -1
    cpdef tuple fields(self)
    @cython.locals(hashed=cython.uint)
    cpdef Py_ssize_t key_partition(self, Py_ssize_t partition_count) except -1
    cpdef object place(self, Py_ssize_t row, Outcome outcome, Py_ssize_t index)
    cdef object _place_run(self, Py_ssize_t row, ProducerBatch batch, Py_ssize_t taken)
    @cython.locals(at=Py_ssize_t, follows=cython.bint)
    cdef object _put(
        self, Py_ssize_t row, Py_ssize_t slot, Py_ssize_t index, long long timestamp
    )
    @cython.locals(grown="long long[::1]", runs=Py_ssize_t, expected=Py_ssize_t)
    cdef object _grow(self, Py_ssize_t row)
    @cython.locals(
        runs="long long[::1]", low=Py_ssize_t, high=Py_ssize_t, middle=Py_ssize_t
    )
    cdef Py_ssize_t _find(self, Py_ssize_t row) except -1
    @cython.locals(end=Py_ssize_t)
    cdef Py_ssize_t _run_rows(self, Py_ssize_t at) except -1
    cdef Py_ssize_t _slot(self, Outcome outcome) except -1
    @cython.locals(outcome=Outcome)
    cpdef object placed(self, Py_ssize_t row, Delivery delivery)
    cpdef object refuse(self, Py_ssize_t row, object error, object topic, object partition)
    @cython.locals(outcome=Outcome, delivery=Delivery)
    cpdef Delivery _delivery(self, Py_ssize_t row)
    @cython.locals(outcome=Outcome, pending=Outcome)
    cpdef Delivery unfinished(self)
    cpdef bint clean(self)
    @cython.locals(delivery=Delivery, outcome=Outcome)
    cpdef bint failed(self, Py_ssize_t row) except -1
    @cython.locals(delivery=Delivery, outcome=Outcome, slot=Py_ssize_t)
    cpdef tuple error(self, Py_ssize_t row)
    @cython.locals(outcome=Outcome)
    cpdef object look(self)
    cpdef object result(self, Py_ssize_t row)
    @cython.locals(
        firsts="long long[::1]",
        lasts="long long[::1]",
        counts="long long[::1]",
        runs="long long[::1]",
        run_end=Py_ssize_t,
        at=Py_ssize_t,
        slot=Py_ssize_t,
        index=Py_ssize_t,
        rows=Py_ssize_t,
        place=Py_ssize_t,
        first=Py_ssize_t,
        row=Py_ssize_t,
        outcome=Outcome,
        part=Outcome,
        delivery=Delivery,
    )
    cpdef list tally(self)


cdef Outcome _pending(Outcome outcome)
cdef bint _acknowledged(Outcome outcome)


# `Rows.place` of a row that came alone, as nearly all do where rows have keys.
cdef inline bint place_row(Rows rows, Py_ssize_t row, Outcome outcome, Py_ssize_t index) except -1:
    cdef Py_ssize_t at = rows._run_end
    cdef long long *run
    if outcome.taker != rows.serial or at + _RUN > rows._runs.shape[0] or at == 0:
        rows.place(row, outcome, index)
        return True
    run = &rows._runs[0] + at
    if run[-3] == outcome.slot:
        rows.place(row, outcome, index)
        return True
    run[0] = row
    run[1] = outcome.slot
    run[2] = index
    run[3] = rows.timestamp
    rows._run_end = at + _RUN
    return True


@cython.locals(taken=Py_ssize_t, size=Py_ssize_t, look=Py_ssize_t, ends=double)
cpdef object gather(
    object iterator,
    list items,
    Py_ssize_t most,
    Py_ssize_t most_bytes,
    double seconds,
    object clock,
)


cdef class Objects(Rows):
    cdef list _items
    cdef ListedValues _values
    cdef Py_ssize_t _base
    cdef object _topic_of_all
    cdef Sizes _key_sizes
    cdef Sizes _value_sizes

    cpdef object add(self, object item)
    cpdef bint ends(self, Py_ssize_t row) except -1
    cpdef bint read(self, Py_ssize_t row) except -1
    @cython.locals(taken=Py_ssize_t)
    cpdef Py_ssize_t fill(
        self,
        ProducerBatch batch,
        Py_ssize_t row,
        Py_ssize_t end,
        Py_ssize_t limit,
        Py_ssize_t most,
    ) except -1
    @cython.locals(outcome=Outcome)
    cpdef object placed(self, Py_ssize_t row, Delivery delivery)
    @cython.locals(at=Py_ssize_t, outcome=Outcome, delivery=Delivery)
    cpdef Delivery _delivery(self, Py_ssize_t row)


@cython.final
cdef class Validity:
    cdef Py_ssize_t _first
    cdef bint _all
    cdef Py_ssize_t _end
    cdef const unsigned char[::1] _bitmap

    @cython.locals(at=Py_ssize_t)
    cpdef bint has(self, Py_ssize_t row) except -1


cdef class Column(Values):
    cdef Py_ssize_t _first
    cdef bint _wide
    cdef const int[::1] _offsets
    cdef const long long[::1] _wide_offsets
    # Where the offset of row 0 is, and how many rows have both of theirs.
    cdef const int *_narrow_at
    cdef const long long *_wide_at
    cdef Py_ssize_t _rows
    cdef Validity _validity
    cdef Py_ssize_t _end
    cdef const unsigned char[::1] _data
    cdef Py_ssize_t start
    cdef const unsigned char *base

    cdef Py_ssize_t locate(self, Py_ssize_t row) except -3
    cpdef bytes present(self, Py_ssize_t size)
    @cython.locals(size=Py_ssize_t)
    cpdef object get(self, Py_ssize_t row)


@cython.locals(place=Py_ssize_t, start=cython.longlong, end=cython.longlong)
cdef inline Py_ssize_t _locate(Column column, Py_ssize_t row) except -3


@cython.locals(hashes="long long[::1]", row=Py_ssize_t, size=Py_ssize_t)
cpdef object murmur2_rows(Column column, Py_ssize_t count)


@cython.final
cdef class Numbers:
    cdef const long long[::1] _values
    cdef Py_ssize_t _first
    cdef Py_ssize_t _rows
    cdef Validity _validity

    cpdef bint has(self, Py_ssize_t row) except -1
    cpdef Py_ssize_t get(self, Py_ssize_t row) except? -1


@cython.final
cdef class HeaderColumn:
    cdef Column _lists
    cdef Py_ssize_t _skipped
    cdef Validity _present
    cdef Column _names
    cdef Column _values
    cdef bytearray buffer

    @cython.locals(count=Py_ssize_t, start=Py_ssize_t, at=Py_ssize_t)
    cpdef object pairs(self, Py_ssize_t row)
    cpdef Py_ssize_t encode(self, Py_ssize_t row) except -2
    @cython.locals(
        count=Py_ssize_t,
        start=Py_ssize_t,
        names=Column,
        values=Column,
        room=Py_ssize_t,
        index=Py_ssize_t,
        size=Py_ssize_t,
        begin="char *",
        at="char *",
    )
    cdef Py_ssize_t _encode(self, Py_ssize_t row) except -2


cdef class Table(Rows):
    cdef Column _keys
    cdef Column _values
    cdef HeaderColumn _header_column
    cdef Numbers _partitions
    cdef Numbers _timestamps
    cdef Numbers _topics
    cdef list _names
    cdef bint _values_only

    @cython.locals(
        number=cython.longlong, column=Column, headers=HeaderColumn, size=Py_ssize_t
    )
    cpdef bint read(self, Py_ssize_t row) except -1
    @cython.locals(topics=Numbers, number=Py_ssize_t)
    cdef object _named(self, Py_ssize_t row)
    @cython.locals(column=Column, taken=Py_ssize_t)
    cpdef Py_ssize_t fill(
        self,
        ProducerBatch batch,
        Py_ssize_t row,
        Py_ssize_t end,
        Py_ssize_t limit,
        Py_ssize_t most,
    ) except -1
    cpdef object record(self, Py_ssize_t row)
