# C types for delivery.py, which reads the same without them.
cimport cython


cdef class Outcome:
    cdef public str topic
    cdef public Py_ssize_t partition
    cdef public object create_future
    cdef public Py_ssize_t count
    cdef public int state
    cdef public long long base_offset
    cdef public long long log_append_time
    cdef public object failure
    cdef public list parts
    cdef public list waiters
    cdef public list callbacks
    cdef public list fences
    cdef public Py_ssize_t observed
    cdef object __weakref__

    cpdef bint acknowledge(self, long long base_offset, long long log_append_time) except? -1
    cpdef bint fail(self, object failure) except? -1
    cpdef object split_into(self, list parts)
    cpdef object add_waiter(self, Py_ssize_t index, object future)
    cpdef object add_callback(self, Py_ssize_t index, object function)
    cpdef object add_fence(self, object fence)
    cpdef tuple _part(self, Py_ssize_t index)
    cdef object _announce(self)


@cython.final
cdef class Delivery:
    cdef Outcome _outcome
    cdef Py_ssize_t _index
    cdef long long _timestamp
    cdef Py_ssize_t _key_size
    cdef Py_ssize_t _value_size
    cdef bint _observed

    cdef Outcome _resolve(self)
    cpdef object waiter(self)
    cpdef object result(self)
