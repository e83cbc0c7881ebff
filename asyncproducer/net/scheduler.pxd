# C types for scheduler.py: its attributes are where a request spends its time.
cimport cython

from asyncproducer.core.accumulator cimport Accumulator


cdef class Scheduler:
    # Tests put their own methods into one.
    cdef dict __dict__
    cdef public Accumulator _accumulator
    cdef public object _cluster
    cdef public object _loop
    cdef public object _metrics
    cdef public object _sequences
    cdef public object _in_thread
    cdef public object _on_ready
    cdef public object _transactions
    cdef public object produce_cap
    cdef public object _client_id
    cdef public int _acks
    cdef public object _retries
    cdef public object _max_request_size
    cdef public double _request_timeout
    cdef public object _timeout_ms
    cdef public double _delivery_timeout
    cdef public double _backoff
    cdef public object _wakeup
    cdef public double _sleeps_until
    cdef public dict _warned
    cdef public bint _stepping
    cdef public bint _step_again
    cdef public dict _tasks
    cdef public object id_error
    cdef public Py_ssize_t _id_refusals
    cdef public bint _id_told
    cdef public bint stopped
    cdef public object fatal_error
