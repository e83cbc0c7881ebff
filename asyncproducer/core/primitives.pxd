# C types for primitives.py: an answer is read with some ten calls of a Reader.
cimport cython


cdef class Reader:
    cdef readonly bytes data
    cdef public Py_ssize_t position
    cdef public Py_ssize_t end
    cdef public bint flexible
    cdef readonly object what

    @cython.locals(start=Py_ssize_t)
    cpdef Py_ssize_t advance(self, long long size) except -1
    @cython.locals(start=Py_ssize_t)
    cpdef object int16(self)
    @cython.locals(start=Py_ssize_t)
    cpdef object int32(self)
    @cython.locals(start=Py_ssize_t)
    cpdef object int64(self)
    @cython.locals(
        data=bytes,
        position=Py_ssize_t,
        end=Py_ssize_t,
        value=cython.ulonglong,
        shift=int,
        byte=cython.ulonglong,
    )
    cpdef long long unsigned_varint(self) except -1
    @cython.locals(start=Py_ssize_t, value=bytes)
    cpdef object uuid(self)
    @cython.locals(start=Py_ssize_t, length=cython.longlong)
    cpdef object nullable_string(self)
    @cython.locals(count=cython.longlong)
    cpdef long long array_length(self, Py_ssize_t element_size) except -1
    @cython.locals(position=Py_ssize_t)
    cpdef object skip_tagged_fields(self)
    cpdef long long tagged_field_count(self) except -1
    cpdef object finish(self)
