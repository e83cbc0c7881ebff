# C types for delivery.py, which reads the same without them.
cimport cython


cdef class Place
cdef class Delivery
cdef class Waiter


cdef class Outcome:
    cdef public str topic
    cdef public Py_ssize_t partition
    cdef public object loop
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
    cdef public long long taker
    cdef public Py_ssize_t slot
    cdef object __weakref__

    cdef bint _begin_at(self, str topic, Py_ssize_t partition, object loop) except -1
    cpdef bint acknowledge(self, long long base_offset, long long log_append_time) except? -1
    cpdef bint fail(self, object failure) except? -1
    @cython.locals(waiter=Waiter, at=Py_ssize_t, delivery=Delivery)
    cpdef object split_into(self, list parts)
    cpdef object add_waiter(self, Waiter waiter)
    cpdef object add_callback(self, Delivery delivery, object function)
    cpdef object add_fence(self, object fence)
    @cython.locals(delivery=Delivery)
    cpdef Delivery delivery(
        self, Py_ssize_t index, long long timestamp, Py_ssize_t key_size, Py_ssize_t value_size
    )
    cpdef tuple _part(self, Py_ssize_t index)
    @cython.locals(at=Py_ssize_t)
    cdef object _announce(self)


cdef class Place:
    cdef Outcome _outcome
    cdef Py_ssize_t _index
    cdef long long _timestamp
    cdef Py_ssize_t _key_size
    cdef Py_ssize_t _value_size
    cdef bint _observed

    cdef void point(
        self,
        Outcome outcome,
        Py_ssize_t index,
        long long timestamp,
        Py_ssize_t key_size,
        Py_ssize_t value_size,
    ) noexcept
    cdef Outcome _resolve(self)
    cpdef bint done(self)
    @cython.locals(outcome=Outcome)
    cpdef object _metadata(self)
    @cython.locals(outcome=Outcome)
    cdef object _failure(self)


@cython.final
cdef class Delivery(Place):
    @cython.locals(outcome=Outcome, waiter=Waiter)
    cpdef Waiter waiter(self)
    cpdef object result(self)


@cython.final
cdef class Waiter(Place):
    cdef public bint _asyncio_future_blocking
    cdef object _wakeup
    cdef object _context

    cpdef object result(self)
    cpdef object get_loop(self)


@cython.locals(at=Py_ssize_t, waiter=Waiter)
cpdef _wake(object loop, list waiters)
