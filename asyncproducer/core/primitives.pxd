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
    cpdef long long int16(self) except? -1
    cpdef long long int32(self) except? -1
    cpdef long long int64(self) except? -1
    @cython.locals(start=Py_ssize_t, data=bytes, value=cython.longlong, place=Py_ssize_t)
    cdef long long _signed(self, Py_ssize_t size) except? -1
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


@cython.locals(value=cython.longlong)
cpdef long long int32_at(bytes data, Py_ssize_t place) except? -1
cpdef object put_int32(bytearray out, Py_ssize_t place, long long value)
cpdef object write_unsigned_varint(bytearray out, unsigned long long value)
cpdef object write_int16(bytearray out, long long value)
cpdef object write_int32(bytearray out, long long value)
@cython.locals(above=cython.longlong, shift=cython.int)
cdef object _write_signed(bytearray out, long long value, int size)
@cython.locals(encoded=bytes)
cpdef object write_string(bytearray out, object value)
@cython.locals(encoded=bytes)
cpdef object write_compact_string(bytearray out, object value)
cdef bytes _encoded(str value)
