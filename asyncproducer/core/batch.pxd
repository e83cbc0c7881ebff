# C types for batch.py, and the C functions that its compiled branch writes with.
cimport cython
from cpython.bytearray cimport (
    PyByteArray_AS_STRING,
    PyByteArray_FromStringAndSize,
    PyByteArray_Resize,
)
from cpython.bytes cimport (
    PyBytes_AS_STRING,
    PyBytes_CheckExact,
    PyBytes_FromStringAndSize,
    PyBytes_GET_SIZE,
)
from cpython.list cimport PyList_GET_ITEM, PyList_GET_SIZE
from cpython.object cimport PyObject
from libc.string cimport memcpy, memmove

from asyncproducer.core.delivery cimport Delivery, Outcome
from asyncproducer.core.spares cimport SpareBuffers

cdef extern from "Python.h":
    const char *PyUnicode_AsUTF8AndSize(object text, Py_ssize_t *size) except NULL


cdef inline Py_ssize_t utf8_size(object text) except -1:
    cdef Py_ssize_t size
    PyUnicode_AsUTF8AndSize(text, &size)
    return size


cdef inline const unsigned char *utf8(object text) except NULL:
    cdef Py_ssize_t size
    return <const unsigned char *>PyUnicode_AsUTF8AndSize(text, &size)


# Of a list, and an item of it, without references of their own: somebody keeps the list, and the
# list its item. To count references of the same list several times for each record takes longer
# than to read its items.
cdef inline PyObject *uncounted(list items) noexcept:
    return <PyObject *>items


cdef inline Py_ssize_t count_of(PyObject *items) noexcept:
    return PyList_GET_SIZE(<object>items)


cdef inline PyObject *item_of(PyObject *items, Py_ssize_t index) noexcept:
    return <PyObject *>PyList_GET_ITEM(<object>items, index)


# Its size and what it holds will be read soon. They are anywhere in memory, which is waited for
# longer than it takes to write a record.
cdef extern from *:
    """
    #if defined(__GNUC__) || defined(__clang__)
    #define ap_prefetch(item) (__builtin_prefetch(item), \
        __builtin_prefetch((const char *)(item) + 64), __builtin_prefetch((const char *)(item) + 128))
    #else
    #define ap_prefetch(item) ((void)0)
    #endif
    """
    void ap_prefetch(PyObject *item) noexcept


cdef inline bint is_bytes(PyObject *item) noexcept:
    return PyBytes_CheckExact(<object>item)


cdef inline Py_ssize_t bytes_size(PyObject *item) noexcept:
    return PyBytes_GET_SIZE(<object>item)


cdef inline const unsigned char *bytes_data(PyObject *item) noexcept:
    return <const unsigned char *>PyBytes_AS_STRING(<object>item)


# What is bytes, or None.
cdef inline Py_ssize_t size_of(object data) noexcept:
    return -1 if data is None else PyBytes_GET_SIZE(data)


cdef inline const unsigned char *octets_at(object data) noexcept:
    return NULL if data is None else <const unsigned char *>PyBytes_AS_STRING(data)


# A signed varint is written at a pointer; the pointer behind it.
cdef inline char *put_varint(char *at, long long value) noexcept:
    cdef unsigned long long zigzag = (<unsigned long long>value << 1) ^ <unsigned long long>(value >> 63)
    if zigzag < 0x80:  # nearly always it has one byte or two
        at[0] = <char>zigzag
        return at + 1
    at[0] = <char>(zigzag | 0x80)
    if zigzag < 0x4000:
        at[1] = <char>(zigzag >> 7)
        return at + 2
    at += 1
    zigzag >>= 7
    while zigzag > 0x7F:
        at[0] = <char>(zigzag | 0x80)
        at += 1
        zigzag >>= 7
    at[0] = <char>zigzag
    return at + 1


# The same of a nullable field with its length, which is -1 for null.
cdef inline char *put_field(char *at, Py_ssize_t size, const unsigned char *field) noexcept:
    if size < 0:
        at[0] = 1
        return at + 1
    at = put_varint(at, size)
    memcpy(at, field, size)
    return at + size


cdef inline char *put_int32(char *at, unsigned int value) noexcept:
    at[0] = <char>(value >> 24)
    at[1] = <char>(value >> 16)
    at[2] = <char>(value >> 8)
    at[3] = <char>value
    return at + 4


cdef inline char *put_int64(char *at, long long value) noexcept:
    return put_int32(put_int32(at, <unsigned int>(value >> 32)), <unsigned int>value)


# A batch's header but for its CRC: magic 2, base offset 0, no leader epoch.
cdef inline void put_header(
    char *at,
    unsigned int length,
    int attributes,
    unsigned int count,
    long long base_timestamp,
    long long max_timestamp,
    long long producer_id,
    int producer_epoch,
    unsigned int base_sequence,
) noexcept:
    at = put_int32(put_int64(at, 0), length)
    at = put_int32(at, <unsigned int>-1)
    at[0] = 2
    at = put_int32(at + 1, 0)
    at[0] = <char>(attributes >> 8)
    at[1] = <char>attributes
    at = put_int32(at + 2, count - 1)
    at = put_int64(put_int64(at, base_timestamp), max_timestamp)
    at = put_int64(at, producer_id)
    at[0] = <char>(producer_epoch >> 8)
    at[1] = <char>producer_epoch
    put_int32(put_int32(at + 2, base_sequence), count)


cdef inline bytes bytes_at(const char *at, Py_ssize_t size):
    return PyBytes_FromStringAndSize(at, size)


cdef inline bytes blank(Py_ssize_t size):
    return PyBytes_FromStringAndSize(NULL, size)


# What it holds is not defined.
cdef inline bytearray new_buffer(Py_ssize_t size):
    return PyByteArray_FromStringAndSize(NULL, size)


cdef inline char *octets_of(bytes data):
    return PyBytes_AS_STRING(data)


cdef enum:
    COMPILED = 1
    # What a record has before its value: five varints of at most 5, 10, 5, 1 and 5 bytes, and one.
    FRONT_BYTES = 32
cdef Py_ssize_t _OVERHEAD
cdef Py_ssize_t _AHEAD
cdef Py_ssize_t _CRC_AT
cdef Py_ssize_t _CRC_FROM
cdef Py_ssize_t _LENGTH_FROM
cdef Py_ssize_t _COPIED_BYTES
cdef Py_ssize_t _LOST_PART
cdef double _ESTIMATE_FACTOR

cdef Py_ssize_t _field_size(object data) except -1
cdef Py_ssize_t _size_of_length(Py_ssize_t length) noexcept
cdef Py_ssize_t _size_of_field(Py_ssize_t size) noexcept
@cython.locals(value=cython.ulonglong, size=Py_ssize_t)
cdef Py_ssize_t _size_of_delta(long long delta) noexcept
cpdef object plain_headers(object headers)
@cython.locals(
    size=Py_ssize_t, length=Py_ssize_t, pair=tuple, encoded=bytes, at="char *"
)
cdef object _encode_plainly(tuple pairs)
cpdef Py_ssize_t batch_upper_bound(object key, object value, bytes headers) except -1


cdef class Values:
    # Where the present one begins.
    cdef const unsigned char *at

    cdef Py_ssize_t locate(self, Py_ssize_t number) except -3


cdef Py_ssize_t _UNKNOWN
cdef Py_ssize_t _DIFFERENT
cdef Py_ssize_t _LARGEST_SIZE


@cython.final
cdef class Sizes:
    cdef Py_ssize_t same
    cdef Py_ssize_t _room
    cdef int[::1] _each

    cpdef object put(self, Py_ssize_t number, Py_ssize_t size)
    cpdef Py_ssize_t of(self, Py_ssize_t number) except? -1


cdef class ListedValues(Values):
    cdef list items
    # The same without a reference of its own, see uncounted.
    cdef PyObject *bare
    cdef Sizes sizes
    cdef Py_ssize_t base

    cdef Py_ssize_t locate(self, Py_ssize_t number) except -3


@cython.locals(item="PyObject *", count=Py_ssize_t, size=Py_ssize_t)
cdef inline Py_ssize_t _locate(ListedValues values, Py_ssize_t number) except -3


@cython.final
cdef class ProducerBatch(Outcome):
    cdef public Py_ssize_t write_limit
    cdef public Py_ssize_t capacity
    cdef public Py_ssize_t easy
    cdef public double created_at
    cdef public object codec
    cdef public double ratio
    cdef public Py_ssize_t memory
    cdef public object share
    cdef public tuple order
    cdef public bint is_open
    cdef public bint ripe
    cdef public Py_ssize_t seen
    cdef public Py_ssize_t sends
    cdef public Py_ssize_t attempts
    cdef public bint in_flight
    cdef public bint maybe_written
    cdef public bint whole_maybe_written
    cdef public bint is_stored
    cdef public object last_error
    cdef public double drained_at
    cdef public double retry_at
    cdef public Py_ssize_t sent_to
    cdef public Py_ssize_t sent_leader_epoch
    cdef public bint is_split
    cdef public Py_ssize_t max_record_size
    cdef public bint compressing
    cdef public bytes payload
    cdef public long long producer_id
    cdef public int producer_epoch
    cdef public long long base_sequence
    cdef public bint renumbered
    cdef public bint transactional
    cdef public long long base_timestamp
    cdef public long long max_timestamp
    cdef public Py_ssize_t size
    cdef public bytearray header
    cdef public bytearray buffer
    cdef SpareBuffers _spares
    cdef Py_ssize_t _before
    cdef list _full
    cdef Py_ssize_t _lost
    cdef Py_ssize_t quick_end
    cdef char *_first

    cdef bint begin(
        self,
        str topic,
        Py_ssize_t partition,
        Py_ssize_t write_limit,
        double created_at,
        object codec,
        double ratio,
        Py_ssize_t memory,
        object loop,
        SpareBuffers spares,
    ) except -1
    cpdef Py_ssize_t estimated_size(self)
    cpdef Py_ssize_t on_the_wire(self, Py_ssize_t size)
    cpdef bint is_full(self)
    cpdef bint has_room(self, Py_ssize_t size)
    cpdef object widen(self, Py_ssize_t capacity, bint ripe)
    @cython.locals(buffer=bytearray)
    cdef bint _quicken(self) except -1

    @cython.locals(
        key_size=Py_ssize_t, value_size=Py_ssize_t
    )
    cpdef Delivery try_append(
        self,
        long long timestamp,
        object key,
        object value,
        bytes headers,
    )

    @cython.locals(
        count=Py_ssize_t,
        delta=cython.longlong,
        fields_size=Py_ssize_t,
        body_size=Py_ssize_t,
        record_size=Py_ssize_t,
        bound=Py_ssize_t,
        buffer=bytearray,
        at="char *",
    )
    cdef bint append_fields(
        self,
        long long timestamp,
        Py_ssize_t key_size,
        const unsigned char *key,
        Py_ssize_t value_size,
        const unsigned char *value,
        Py_ssize_t headers_size,
        const unsigned char *headers,
    ) except -1
    @cython.locals(
        buffer=bytearray,
        count=Py_ssize_t,
        delta=cython.longlong,
        around=Py_ssize_t,
        size=Py_ssize_t,
        largest=Py_ssize_t,
        number=Py_ssize_t,
        listed=ListedValues,
        found=Py_ssize_t,
        value_size=Py_ssize_t,
        body_size=Py_ssize_t,
        record_size=Py_ssize_t,
        needed=Py_ssize_t,
        room=Py_ssize_t,
        bound=Py_ssize_t,
        front=cython.char[32],
        front_size=Py_ssize_t,
        number_at=Py_ssize_t,
        number_size=Py_ssize_t,
        alike=Py_ssize_t,
        behind="char *",
        at="char *",
    )
    cpdef Py_ssize_t append_values(
        self,
        Values values,
        Py_ssize_t first,
        Py_ssize_t end,
        long long timestamp,
        Py_ssize_t limit,
        Py_ssize_t most,
    ) except -1
    @cython.locals(
        buffer=bytearray,
        following=bytearray,
        has=Py_ssize_t,
        room=Py_ssize_t,
        left=Py_ssize_t,
        much=bint,
    )
    cdef bytearray _make_room(self, Py_ssize_t written, Py_ssize_t record_size)
    cdef bytearray _enlarge(self, Py_ssize_t size)
    cdef tuple _written(self)
    @cython.locals(buffer=bytearray)
    cdef object _give_buffer_back(self)
    cpdef object close(self)
    cpdef object set_producer_state(
        self, long long producer_id, int producer_epoch, long long base_sequence, bint transactional
    )
    @cython.locals(
        attributes=cython.int,
        payload=bytes,
        header=bytearray,
        length=Py_ssize_t,
        crc=cython.uint,
        at="char *",
    )
    cpdef object seal(self)
    @cython.locals(pieces=tuple, crc=cython.uint)
    cdef unsigned int _whole_crc(self) except? 0
    cdef bytearray _head(self)
    cpdef tuple buffers(self)
    cpdef object release(self)
    cpdef bint needs_compression(self)


# `ProducerBatch.append_fields` of what is bytes, or None.
cdef inline bint append_bytes(
    ProducerBatch batch, long long timestamp, object key, object value, bytes headers
) except -1:
    return batch.append_fields(
        timestamp,
        size_of(key),
        octets_at(key),
        size_of(value),
        octets_at(value),
        size_of(headers),
        octets_at(headers),
    )


# `append_fields` without headers, where nothing is to be looked at: the batch, were the record as large
# as it can be, remains smaller than `quick_end`. Returns how much larger it is now.
cdef inline Py_ssize_t put_record(
    ProducerBatch batch,
    long long timestamp,
    Py_ssize_t key_size,
    const unsigned char *key,
    Py_ssize_t value_size,
    const unsigned char *value,
) noexcept:
    cdef Py_ssize_t bound, size
    cdef char *fields
    # How large it is will be known when it is written. So many bytes are left for that number, which
    # has as many nearly always.
    cdef Py_ssize_t width = 1 if key_size + value_size < 52 else 2
    cdef char *begin = batch._first + batch.size
    cdef char *body = begin + width
    body[0] = 0
    fields = put_varint(body + 1, timestamp - batch.base_timestamp)
    fields = put_varint(fields, batch.count)
    size = put_field(put_field(fields, key_size, key), value_size, value) - body
    body[size] = 0
    size += 1
    bound = _OVERHEAD + size - (fields - body)
    if width == 2 and 64 <= size < 8192:
        begin[0] = <char>(2 * size | 0x80)
        begin[1] = <char>(size >> 6)
    else:
        if width != _size_of_length(size):
            width = _size_of_length(size)
            memmove(begin + width, body, size)
        put_varint(begin, size)
    size += width
    batch.size += size
    batch.count += 1
    if timestamp > batch.max_timestamp:
        batch.max_timestamp = timestamp
    if bound > batch.max_record_size:
        batch.max_record_size = bound
    return size
