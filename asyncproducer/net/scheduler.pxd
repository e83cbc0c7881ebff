# C types for scheduler.py: its attributes are where a request spends its time.
cimport cython

from asyncproducer.core.accumulator cimport Accumulator
from asyncproducer.core.batch cimport ProducerBatch
from asyncproducer.core.metrics cimport Metrics
from asyncproducer.core.sequences cimport Sequences

cdef int _NONE
cdef int _DUPLICATE
cdef double _NEVER


cdef class Scheduler:
    # Tests put their own methods into one.
    cdef dict __dict__
    cdef public Accumulator _accumulator
    cdef public object _cluster
    cdef public object _loop
    cdef public object _time
    cdef public Metrics _metrics
    cdef public Sequences _sequences
    cdef public object _in_thread
    cdef public object _on_ready
    cdef public object _transactions
    cdef public object produce_cap
    cdef public object _client_id
    cdef dict _heads
    cdef public int _acks
    cdef public object _retries
    cdef public Py_ssize_t _max_request_size
    cdef public double _request_timeout
    cdef public object _timeout_ms
    cdef public double _delivery_timeout
    cdef public double _backoff
    cdef public object _wakeup
    cdef public double _sleeps_until
    cdef public double _reached
    cdef public double _expires_from
    cdef public double _held_until
    cdef public dict _warned
    cdef public bint _stepping
    cdef public bint _step_again
    cdef public bint _turning
    cdef public bint _compressed
    cdef public bint _ended
    cdef public dict _tasks
    cdef public object id_error
    cdef public Py_ssize_t _id_refusals
    cdef public bint _id_told
    cdef public bint stopped
    cdef public object fatal_error

    cpdef double try_step(self, double now) except? -2
    cdef double _awake_by(self, double deadline) except? -2
    cpdef object wake(self)
    @cython.locals(accumulator=Accumulator, deadline=double)
    cpdef double step(self, double now) except? -2
    @cython.locals(accumulator=Accumulator, ready=cython.bint, until=double, batches=list)
    cpdef object _serve(self, int node, double now)
    @cython.locals(batch=ProducerBatch, metrics=Metrics, by_place=dict, topics=dict, partitions=dict)
    cpdef object _send(self, object connection, list batches, double now)
    @cython.locals(batch=ProducerBatch, answers=dict, strays=list, twice=list, refused=list)
    cpdef object _response(self, object response, list batches, dict by_place, double now)
    cdef object _acknowledge(
        self, ProducerBatch batch, long long base_offset, long long log_append_time, double now
    )
    cpdef object _idempotence(self, double now)
