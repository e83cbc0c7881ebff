# C types for sequences.py: each batch asks four times.
cimport cython

from asyncproducer.core.batch cimport ProducerBatch

cdef long long _MODULO
cdef object _READY

cpdef long long increment(long long sequence, long long by) except? -1
cpdef bint is_before(long long first, long long second) except -1


@cython.final
cdef class PartitionSequences:
    cdef public object owner
    cdef public long long producer_id
    cdef public int producer_epoch
    cdef public long long next_sequence
    cdef public long long last_acked_sequence
    cdef public long long last_acked_offset
    cdef public bint maybe_forgotten
    cdef public list outstanding
    cdef public object unresolved
    cdef public object hole

    cpdef bint is_before_hole(self, ProducerBatch batch) except -1


cdef class Sequences:
    cdef public object state
    cdef public long long producer_id
    cdef public int producer_epoch
    cdef public object fatal_error
    cdef public Py_ssize_t epoch_bumps
    cdef dict _renumber
    cdef dict _unresolved

    cdef bint _stale(self, PartitionSequences partition) except -1
    @cython.locals(leader=Py_ssize_t, other=ProducerBatch, first=ProducerBatch)
    cpdef bint may_drain(self, PartitionSequences partition, ProducerBatch batch) except -1
    cpdef object assign(self, PartitionSequences partition, ProducerBatch batch)
    cpdef object acknowledged(
        self, PartitionSequences partition, ProducerBatch batch, long long base_offset
    )
    cpdef bint _same_epoch(self, PartitionSequences partition, ProducerBatch batch) except -1
    cdef object _forget(self, PartitionSequences partition, ProducerBatch batch)
