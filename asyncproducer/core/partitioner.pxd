# C types for partitioner.py, which reads the same without them.
cimport cython

ctypedef const unsigned char *octets_t


@cython.locals(octets=octets_t)
cpdef unsigned int murmur2(object data)

@cython.locals(
    mask=cython.uint,
    m=cython.uint,
    h=cython.uint,
    k=cython.uint,
    tail=Py_ssize_t,
    i=Py_ssize_t,
)
cdef unsigned int hash_octets(octets_t octets, Py_ssize_t length) noexcept

@cython.locals(h=cython.uint)
cpdef Py_ssize_t partition_for_key(object key, Py_ssize_t partition_count) except -1


@cython.final
cdef class BuiltInPartitioner:
    cdef readonly str topic
    cdef object _random
    cdef object _view
    cdef Py_ssize_t _count
    cdef tuple _available
    cdef list _cumulative
    cdef list _partition_ids
    cdef Py_ssize_t _partition
    cdef long long _sticky_batch_size
    cdef long long _produced_bytes

    cpdef Py_ssize_t peek(self, object topic) except -1

    @cython.locals(produced=cython.longlong, size=cython.longlong)
    cpdef bint update(
        self, Py_ssize_t partition, long long appended_bytes, object topic, bint enable_switch
    ) except -1

    @cython.locals(size=cython.longlong)
    cpdef long long room(self, bint enable_switch)

    cpdef object update_load(
        self, object queue_sizes, object partition_ids=*, Py_ssize_t length=*
    )

    cdef object _look_at(self, object topic)

    cdef object _switch(self)

    @cython.locals(number=cython.longlong, cumulative=list, partition=Py_ssize_t, available=tuple)
    cdef Py_ssize_t _choose(self) except -1

    @cython.locals(available=tuple, index=Py_ssize_t)
    cdef bint _usable(self, Py_ssize_t partition) except -1


@cython.locals(
    low=Py_ssize_t,
    high=Py_ssize_t,
    middle=Py_ssize_t,
    last=cython.longlong,
    point=cython.longlong,
    value=cython.longlong,
)
cdef Py_ssize_t _first_above(list sums, long long number) except -1
