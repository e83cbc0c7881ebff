# C types for frames.py.
cimport cython


from asyncproducer.core.primitives cimport int32_at

cdef Py_ssize_t _PREFIX


cdef class FrameReader:
    cdef readonly list _chunks
    cdef Py_ssize_t _have
    cdef Py_ssize_t _need


cdef Py_ssize_t _size(bytes data, Py_ssize_t start) except -1
