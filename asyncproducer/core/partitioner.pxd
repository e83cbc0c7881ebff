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
    cdef list _cumulative
    cdef list _partition_ids
    cdef Py_ssize_t _partition
    cdef long long _sticky_batch_size
    cdef long long _produced_bytes

    @cython.locals(partition=Py_ssize_t)
    cpdef Py_ssize_t peek(self, object topic)

    @cython.locals(produced=cython.longlong, size=cython.longlong)
    cpdef bint update(
        self, Py_ssize_t partition, long long appended_bytes, object topic, bint enable_switch
    ) except -1

    @cython.locals(size=cython.longlong)
    cpdef long long room(self, bint enable_switch)

    cpdef object update_load(
        self, object queue_sizes, object partition_ids=*, Py_ssize_t length=*
    )

    cdef object _switch(self, object topic)

    cdef Py_ssize_t _choose(self, object topic)

    cdef bint _usable(self, Py_ssize_t partition, object topic)
