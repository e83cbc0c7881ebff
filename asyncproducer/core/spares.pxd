# C types for spares.py, which reads the same without them.
cimport cython


cdef extern from *:
    """
    static inline Py_ssize_t exports_of(PyObject *buffer)
    {
        return ((PyByteArrayObject *)buffer)->ob_exports;
    }
    """
    # How many memoryviews and the like there are of a bytearray.
    Py_ssize_t exports "exports_of"(object buffer)

cdef bint COMPILED


@cython.final
cdef class SpareBuffers:
    cdef Py_ssize_t _most_bytes
    cdef readonly Py_ssize_t size
    cdef object _memory
    cdef dict _by_size

    @cython.locals(buffers=list, buffer=bytearray)
    cpdef bytearray take(self, Py_ssize_t size)
    @cython.locals(buffers=list, size=Py_ssize_t)
    cpdef object put(self, bytearray buffer)
    cpdef object make_way(self)
    @cython.locals(buffers=list, size=Py_ssize_t)
    cdef object _shrink(self, Py_ssize_t most_bytes)
