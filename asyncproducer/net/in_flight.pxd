# C types for in_flight.py.
cimport cython


cdef class Pending:
    cdef readonly object api_key
    cdef readonly object version
    cdef readonly object correlation_id
    cdef readonly double timeout
    cdef readonly double since
    cdef public double deadline
    cdef readonly object on_done


cdef class InFlight:
    cdef object _loop
    cdef object _time
    cdef object _on_timeout
    cdef object _queue
    cdef object _timer
    cdef double _timer_at

    @cython.locals(pending=Pending)
    cpdef object add(
        self,
        object api_key,
        object version,
        object correlation_id,
        double timeout,
        object on_done,
    )
    @cython.locals(head=Pending)
    cpdef tuple take(self, object frame)
    cdef object _watch(self, double deadline)
