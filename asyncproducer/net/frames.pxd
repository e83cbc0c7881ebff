# C types for frames.py.
cimport cython


cdef class FrameReader:
    cdef readonly list _chunks
    cdef Py_ssize_t _have
    cdef Py_ssize_t _need
