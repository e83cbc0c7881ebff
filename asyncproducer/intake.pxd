# C types for intake.py, which reads the same without them.
cimport cython

from asyncproducer.core.accumulator cimport Accumulator, TopicState
from asyncproducer.core.delivery cimport Delivery


cdef class Intake:
    cdef public Accumulator accumulator
    cdef public object loop_time
    cdef public object open_loop
    cdef public object breathing
    cdef public object partitioner
    cdef object _config
    cdef object _loop
    cdef object _metadata
    cdef object _cluster
    cdef object _pool
    cdef object _pool_line
    cdef object _scheduler
    cdef tuple _interceptors
    cdef object _key_serializer
    cdef object _value_serializer
    cdef bint _serializes
    cdef bint _async_serializers
    cdef object _check_usable
    cdef bint _hash_keys
    cdef double _max_block
    cdef Py_ssize_t _certain_size
    cdef dict _lines
    cdef dict _absent
    cdef int _filled
    cdef bint _settling
    cdef object __weakref__

    @cython.locals(
        headers=bytes,
        size=Py_ssize_t,
        state=TopicState,
        accumulator=Accumulator,
        delivery=Delivery,
    )
    cdef object _enter_bytes(
        self,
        object topic,
        object value,
        object key,
        list pairs,
        object partition,
        object timestamp,
        bint wait,
    )
    @cython.locals(accumulator=Accumulator)
    cdef object _after_news(self)
