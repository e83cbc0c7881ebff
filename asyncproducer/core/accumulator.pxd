# C types for accumulator.py, which reads the same without them.
cimport cython

from cpython.list cimport PyList_GET_ITEM
from cpython.object cimport PyObject

from asyncproducer.core.batch cimport (
    ProducerBatch,
    append_bytes,
    batch_upper_bound,
    octets_at,
    put_record,
    size_of,
)
from asyncproducer.core.bulk cimport Rows, place_row
from asyncproducer.core.delivery cimport Delivery
from asyncproducer.core.partitioner cimport BuiltInPartitioner, hash_octets
from asyncproducer.core.sequences cimport PartitionSequences, Sequences
from asyncproducer.core.spares cimport SpareBuffers


cdef extern from "Python.h":
    Py_ssize_t Py_REFCNT(object)

cdef enum:
    COMPILED = 1
cdef Py_ssize_t _MOST_ADDED
cdef Py_ssize_t _WORTH_PARTITIONS
cdef double _COMPRESSING_SECONDS
cdef double _LEARNING
cdef Py_ssize_t _THREAD_BYTES


@cython.final
cdef class TopicState:
    cdef public str name
    cdef public object view
    cdef public Py_ssize_t partition_count
    cdef public Py_ssize_t most_bytes
    cdef public bint known
    cdef public BuiltInPartitioner partitioner
    cdef public list queues
    cdef public Py_ssize_t queued_batches
    cdef public double load_at
    cdef public ProducerBatch sticky
    cdef public long long unsaid
    cdef public long long room
    cdef public bint stays


@cython.final
cdef class PartitionQueue:
    cdef public TopicState topic
    cdef public Py_ssize_t partition
    cdef public object batches
    cdef public ProducerBatch open
    cdef public bint quiet
    cdef public Py_ssize_t passed
    cdef public list in_flight
    cdef public Py_ssize_t leader
    cdef public Py_ssize_t leader_epoch
    cdef public object share
    cdef public Py_ssize_t next_order
    cdef public object ready_at
    cdef public double timer
    cdef public PartitionSequences sequences


@cython.final
cdef class Accumulator:
    cdef object _memory
    cdef readonly SpareBuffers spares
    cdef Py_ssize_t _batch_size
    cdef Py_ssize_t _batch_max_bytes
    cdef double _linger
    cdef double _held
    cdef Py_ssize_t _worth
    cdef double _delivery_timeout
    cdef double _grows_for
    cdef object _retry_backoff
    cdef object _random
    cdef object _codec
    cdef Sequences _sequences
    cdef bint _one_in_flight
    cdef bint _adaptive
    cdef double _availability_timeout
    cdef public Py_ssize_t quick_bytes
    cdef Py_ssize_t _quick_left
    cdef Py_ssize_t _least_quick
    cdef Py_ssize_t _most_quick
    cdef double _slowness
    cdef object _clock
    cdef public bint compressed_here
    cdef public list postponed
    cdef object _loop
    cdef object _trouble
    cdef object _on_failed
    cdef public object estimator
    cdef public dict topics
    cdef public dict ready
    cdef public dict leaderless
    cdef dict _lingering
    cdef list _timers
    cdef Py_ssize_t _timer_count
    cdef Py_ssize_t _timer_limit
    cdef public object incomplete
    cdef public list to_compress
    cdef public list fresh
    cdef bint _adaptive_linger
    cdef public Py_ssize_t flushing
    cdef public bint closed
    cdef bint _rushing
    cdef Py_ssize_t _returned
    cdef public bint news
    cdef public bint pouring
    cdef public Delivery last
    cdef dict _node_times

    @cython.locals(
        batch=ProducerBatch,
        before=Py_ssize_t,
        delivery=Delivery,
    )
    cpdef Delivery append_open(
        self,
        TopicState topic,
        Py_ssize_t partition,
        long long timestamp,
        object key,
        object value,
        bytes headers,
        Py_ssize_t size,
    )

    cpdef object stay(self, TopicState topic, bint stays)

    @cython.locals(batch=ProducerBatch, before=Py_ssize_t, size=Py_ssize_t)
    cpdef ProducerBatch append_row(self, TopicState topic, Py_ssize_t partition, Rows rows)

    @cython.locals(batch=ProducerBatch, before=Py_ssize_t, limit=Py_ssize_t)
    cpdef Py_ssize_t append_run(
        self, TopicState topic, Rows rows, Py_ssize_t row, Py_ssize_t end, Py_ssize_t most
    ) except -1

    @cython.locals(partition_count=Py_ssize_t, place=Py_ssize_t)
    cpdef Py_ssize_t append_spread(
        self,
        TopicState topic,
        Rows rows,
        Py_ssize_t row,
        Py_ssize_t end,
        Py_ssize_t most,
        bint hashes,
    ) except -1
    @cython.locals(size=Py_ssize_t)
    cdef bint _count(self, TopicState topic, ProducerBatch batch, Py_ssize_t before) except -1
    @cython.locals(size=cython.longlong, partitioner=BuiltInPartitioner)
    cdef bint _tell(self, TopicState topic, ProducerBatch batch) except -1
    @cython.locals(batch=ProducerBatch)
    cdef bint _unstick(self, TopicState topic) except -1

    @cython.locals(
        sticky=cython.bint,
        queue=PartitionQueue,
        batch=ProducerBatch,
        before=Py_ssize_t,
        memory=Py_ssize_t,
        delivery=Delivery,
        size=Py_ssize_t,
    )
    cpdef Delivery append(
        self,
        TopicState topic,
        Py_ssize_t partition,
        long long timestamp,
        object key,
        object value,
        bytes headers,
        double now,
        Py_ssize_t granted=*,
    )

    @cython.locals(
        most=Py_ssize_t, limit=Py_ssize_t, larger=Py_ssize_t, ripe=cython.bint, grows=cython.bint
    )
    cdef bint _grow(
        self,
        PartitionQueue queue,
        ProducerBatch batch,
        Py_ssize_t size,
        double now,
        Py_ssize_t granted,
    ) except -1

    cdef object _charge(self, ProducerBatch batch, Py_ssize_t memory)

    @cython.locals(queue=PartitionQueue)
    cpdef object share_of(self, TopicState topic, Py_ssize_t partition)

    @cython.locals(partitioner=BuiltInPartitioner)
    cpdef bint move_on(self, TopicState topic, Py_ssize_t size=*) except -1

    @cython.locals(size=Py_ssize_t)
    cpdef Py_ssize_t batch_bytes(self, object key, object value, bytes headers) except -1

    @cython.locals(batch=ProducerBatch)
    cdef ProducerBatch _new_batch(self, PartitionQueue queue, Py_ssize_t size, double now)

    @cython.locals(memory=Py_ssize_t)
    cdef object _begin(self, PartitionQueue queue, ProducerBatch batch)

    cdef object _produced(
        self,
        TopicState topic,
        PartitionQueue queue,
        ProducerBatch batch,
        Py_ssize_t size,
        double now,
    )

    @cython.locals(
        count=Py_ssize_t,
        queued=Py_ssize_t,
        started=Py_ssize_t,
        queue=PartitionQueue,
        batch=ProducerBatch,
        sizes=list,
        ids=list,
    )
    cdef object _update_load(self, TopicState topic, double now)

    @cython.locals(batch=ProducerBatch)
    cdef object _close_tail(self, PartitionQueue queue, double now)

    cdef object _close(self, PartitionQueue queue, ProducerBatch batch)

    @cython.locals(head=ProducerBatch, due=cython.double)
    cdef double _due_at(self, PartitionQueue queue, double now) except? -2

    @cython.locals(
        due=cython.double, until=cython.double, size=Py_ssize_t, queue=PartitionQueue, head=ProducerBatch
    )
    cpdef double held_until(self, int node, double now) except? -2

    @cython.locals(due=cython.double)
    cdef object _touch(self, PartitionQueue queue, double now)

    # The way of a request.

    @cython.locals(queue=PartitionQueue, batch=ProducerBatch, growing=list, fresh=list)
    cpdef bint settle(self, double now, object is_idle) except -1

    @cython.locals(queue=PartitionQueue)
    cpdef object fire_timers(self, double now)

    @cython.locals(deadline=cython.double, expiry=cython.double, batch=ProducerBatch)
    cpdef double next_deadline(self, double expires_from=*) except? -2

    @cython.locals(
        queue=PartitionQueue,
        head=ProducerBatch,
        size=Py_ssize_t,
        batch_size=Py_ssize_t,
        drained=list,
        wanting=cython.bint,
    )
    cpdef list drain(self, int node, Py_ssize_t max_size, double now)
    cpdef bint turned(self, double now) except -1
    @cython.locals(size=Py_ssize_t)
    cdef bint _postpones(self, ProducerBatch batch) except -1
    @cython.locals(size=Py_ssize_t)
    cdef bint _compress(self, ProducerBatch batch) except -1
    @cython.locals(slowness=double)
    cdef bint _learn(self, Py_ssize_t size, double seconds) except -1
    cdef bint _may_leave(self, PartitionQueue queue, ProducerBatch head, double now) except -1
    cdef object _take(self, PartitionQueue queue, ProducerBatch batch, double now)
    @cython.locals(topic=TopicState)
    cdef PartitionQueue _queue(self, ProducerBatch batch)
    @cython.locals(queue=PartitionQueue)
    cpdef object landed(self, ProducerBatch batch)
    @cython.locals(queue=PartitionQueue, fresh=cython.bint)
    cpdef bint acknowledge(
        self, ProducerBatch batch, long long base_offset, long long log_append_time, double now
    ) except -1
    cdef object _free(self, ProducerBatch batch)
    @cython.locals(size=Py_ssize_t)
    cpdef object give_back(self)
    @cython.locals(batch=ProducerBatch)
    cpdef bint has_expired(self, double now) except -1
    @cython.locals(batch=ProducerBatch, expired=list)
    cpdef list expire(self, double now, bint in_flight=*)


# A function, not a method, so that C has it in place: that saves each record a call.
@cython.locals(queue=PartitionQueue, batch=ProducerBatch)
cdef inline ProducerBatch _with_room(TopicState topic, Py_ssize_t partition, Py_ssize_t size)
@cython.locals(queue=PartitionQueue)
cdef ProducerBatch _switched(TopicState topic)


# `Accumulator.append_open` without headers, for nearly every record. None: go that way. No object has
# another name here: each would be counted, for each record.
cdef inline Delivery append_quickly(
    Accumulator accumulator,
    TopicState topic,
    Py_ssize_t partition,
    long long timestamp,
    object key,
    object value,
    Py_ssize_t size,
):
    cdef PyObject *batch = <PyObject *>topic.sticky if partition < 0 else _open_of(topic, partition)
    if (
        batch is <PyObject *>None
        or (<ProducerBatch>batch).size + size + _MOST_ADDED >= (<ProducerBatch>batch).quick_end
    ):
        return None
    return _add(accumulator, topic, <ProducerBatch>batch, partition < 0, timestamp, key, value)


# The present row, which has no headers, where that takes no more than writing. False: it does.
cdef inline bint put_row(
    TopicState topic, Py_ssize_t partition, Rows rows, Py_ssize_t row
) except -1:
    cdef PyObject *batch = _open_of(topic, partition)
    cdef Py_ssize_t index
    if (
        batch is <PyObject *>None
        or (<ProducerBatch>batch).size + rows.size + _MOST_ADDED >= (<ProducerBatch>batch).quick_end
    ):
        return False
    index = (<ProducerBatch>batch).count
    put_record(
        <ProducerBatch>batch, rows.timestamp, rows.key_size, rows.key, rows.value_size, rows.value
    )
    return place_row(rows, row, <ProducerBatch>batch, index)


cdef inline PyObject *_open_of(TopicState topic, Py_ssize_t partition) noexcept:
    cdef PyObject *queue = PyList_GET_ITEM(<object><PyObject *>topic.queues, partition)
    return queue if queue is <PyObject *>None else <PyObject *>(<PartitionQueue>queue).open


cdef inline Delivery _add(
    Accumulator accumulator,
    TopicState topic,
    ProducerBatch batch,
    bint sticky,
    long long timestamp,
    object key,
    object value,
):
    cdef Py_ssize_t index = batch.count
    cdef Py_ssize_t key_size = size_of(key)
    cdef Py_ssize_t value_size = size_of(value)
    cdef Py_ssize_t size = put_record(
        batch, timestamp, key_size, octets_at(key), value_size, octets_at(value)
    )
    if sticky:
        topic.unsaid += size
        if topic.unsaid >= topic.room:
            accumulator._tell(topic, batch)
    return delivery_of(accumulator, batch, index, timestamp, key_size, value_size)


# The Delivery of a record. A loop that keeps none of them needs one: the last, if nobody else has it.
cdef inline Delivery delivery_of(
    Accumulator accumulator,
    ProducerBatch batch,
    Py_ssize_t index,
    long long timestamp,
    Py_ssize_t key_size,
    Py_ssize_t value_size,
):
    if not _is_free(<PyObject *>accumulator.last, <PyObject *>batch):
        return _new_delivery(accumulator, batch, index, timestamp, key_size, value_size)
    accumulator.last._index = index
    accumulator.last._timestamp = timestamp
    accumulator.last._key_size = key_size
    accumulator.last._value_size = value_size
    accumulator.last._observed = False
    return accumulator.last


cdef inline bint _is_free(PyObject *delivery, PyObject *batch) noexcept:
    return (
        delivery is not <PyObject *>None
        and Py_REFCNT(<object>delivery) == 1
        and <PyObject *>(<Delivery>delivery)._outcome is batch
    )


cdef inline Delivery _new_delivery(
    Accumulator accumulator,
    ProducerBatch batch,
    Py_ssize_t index,
    long long timestamp,
    Py_ssize_t key_size,
    Py_ssize_t value_size,
):
    cdef Delivery delivery = batch.delivery(index, timestamp, key_size, value_size)
    accumulator.last = delivery
    return delivery
