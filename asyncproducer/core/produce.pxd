# C types for produce.py.
cimport cython

from asyncproducer.core.primitives cimport (
    Reader,
    put_int32,
    write_compact_string,
    write_int16,
    write_int32,
    write_string,
    write_unsigned_varint,
)

cdef int _LOG_START_OFFSET
cdef int _ZSTD
cdef int _RECORD_ERRORS
cdef int _FLEXIBLE
cdef int _CURRENT_LEADER
cdef int _TOPIC_IDS
cdef Py_ssize_t _HEADER_BYTES
cdef Py_ssize_t _BATCH_LENGTH_AT
cdef Py_ssize_t _BATCH_LENGTH_COUNTS_FROM
cdef Py_ssize_t _MAGIC_AT
cdef Py_ssize_t _CODEC_AT
cdef int _TAG
cdef int _API_KEY
cdef Py_ssize_t _SIZE_BYTES
cdef Py_ssize_t _CORRELATION_ID_AT
cdef long long _MAX_INT32


@cython.locals(
    flexible=cython.bint,
    buffers=list,
    out=bytearray,
    first=bytearray,
    total=cython.longlong,
    size=cython.longlong,
    head=bytes,
)
cpdef list encode_produce(
    int version,
    long long correlation_id,
    object client_id,
    int acks,
    long long timeout_ms,
    object transactional_id,
    object topics,
    dict heads=*,
)
cdef bytes _head(
    int version, object client_id, int acks, long long timeout_ms, object transactional_id
)
cdef object _check_version(int version)
cdef object _write_count(bytearray out, Py_ssize_t count, bint flexible)
cdef object _write_topic(bytearray out, object topic, int version, bint flexible)
@cython.locals(size=cython.longlong, length=cython.longlong)
cdef long long _batch_size(object topic, object partition, int version) except -1
@cython.locals(reader=Reader, flexible=cython.bint, partitions=list, count=Py_ssize_t)
cpdef object decode_produce(int version, object body)
@cython.locals(
    count=Py_ssize_t,
    partition=cython.longlong,
    error_code=cython.longlong,
    base_offset=cython.longlong,
    log_append_time=cython.longlong,
    log_start_offset=cython.longlong,
    leader=cython.longlong,
    leader_epoch=cython.longlong,
)
cdef object _read_partition(Reader reader, int version, object topic, object topic_id)
