# C types for outbox.py.
cimport cython

cdef Py_ssize_t _LARGE_BYTES
cdef Py_ssize_t _LEAST_BYTES
cdef Py_ssize_t _JOINED_BYTES


@cython.final
cdef class Outbox:
    cdef object _buffers
    cdef Py_ssize_t _size

    @cython.locals(before=Py_ssize_t)
    cpdef Py_ssize_t put(self, object buffers) except -1
    @cython.locals(taken=Py_ssize_t, size=Py_ssize_t, wanted=Py_ssize_t, piece=list)
    cpdef list take(self, Py_ssize_t most=*)
