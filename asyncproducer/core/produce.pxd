# C types for produce.py.
cimport cython

from asyncproducer.core.primitives cimport Reader


@cython.locals(reader=Reader)
cpdef object decode_produce(object version, object body)
cdef object _read_partition(Reader reader, object version, object topic, object topic_id)
