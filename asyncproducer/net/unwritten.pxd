# C types for unwritten.py: each request asks three times how many there are.
cimport cython


@cython.final
cdef class Unwritten:
    cdef object _loop
    cdef object _left
    cdef object _on_written
    cdef object _on_timeout
    cdef long long _handed
    cdef object _queue
    cdef readonly object _timer

    cpdef object handed(self, Py_ssize_t size)
    cpdef object look(self)
