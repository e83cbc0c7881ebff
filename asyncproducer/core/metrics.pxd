# C types for metrics.py: `add` is called twenty times for each request.
cimport cython

from asyncproducer.core.batch cimport ProducerBatch


@cython.final
cdef class Sampled:
    cdef double _window
    cdef object _ring
    cdef dict _samples
    cdef readonly double total
    cdef readonly long long count
    cdef double _start
    cdef double _end
    cdef double _sum
    cdef long long _events
    cdef double _max

    cpdef object add(self, double value, double now, long long count=*)
    cdef object _turn_to(self, double now)


@cython.final
cdef class _Topic:
    cdef readonly Sampled records
    cdef readonly Sampled bytes
    cdef readonly Sampled compression
    cdef readonly Sampled retries
    cdef readonly Sampled errors


@cython.final
cdef class _Node:
    cdef readonly Sampled written
    cdef readonly Sampled read
    cdef readonly Sampled request_size
    cdef readonly Sampled latency


cdef class Metrics:
    cdef readonly object client_id
    cdef object _sampled
    cdef readonly long long acknowledged
    cdef readonly long long failed
    cdef double _now
    cdef readonly Sampled _batch_size
    cdef readonly Sampled _compression
    cdef readonly Sampled _queue_time
    cdef readonly Sampled _latency
    cdef readonly Sampled _throttle
    cdef readonly Sampled _sent_records
    cdef readonly Sampled _per_request
    cdef readonly Sampled _retries
    cdef readonly Sampled _errors
    cdef readonly Sampled _record_size
    cdef readonly Sampled _splits
    cdef readonly Sampled _exhausted
    cdef readonly Sampled _memory_waits
    cdef readonly Sampled _opened
    cdef readonly Sampled _closed
    cdef readonly Sampled _written
    cdef readonly Sampled _read
    cdef readonly Sampled _answers
    cdef readonly Sampled _authentications
    cdef readonly Sampled _failed_authentications
    cdef readonly Sampled _reauthentications
    cdef readonly Sampled _failed_reauthentications
    cdef double _flush_seconds
    cdef double _metadata_seconds
    cdef dict _transaction_seconds
    cdef dict _topics
    cdef dict _nodes

    @cython.locals(size=Py_ssize_t, ratio=double, topic=_Topic)
    cpdef object batch_drained(self, ProducerBatch batch, double now)
    @cython.locals(size=Py_ssize_t, records=Py_ssize_t, batch=ProducerBatch)
    cpdef object request_sent(self, object node_id, object batches)
    cpdef object request_done(self, object node_id, object latency)
    cpdef object throttled(self, double throttle_ms)
    cpdef object batch_acknowledged(self, ProducerBatch batch, double now)
    cpdef object tick(self, double now)
    cpdef object written(self, object node_id, double size, double now)
    cpdef object read(self, object node_id, double size, double now)
    cpdef object answered(self, double now)
    cdef _Node _node(self, object node_id)
