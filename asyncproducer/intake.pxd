# C types for intake.py, which reads the same without them.
cimport cython
from cpython.object cimport PyObject
from cpython.pythread cimport PyThread_get_thread_ident as c_get_ident
from cpython.time cimport monotonic as c_monotonic, time_ns as c_time_ns

from asyncproducer.core.accumulator cimport Accumulator, TopicState, append_quickly
from asyncproducer.core.batch cimport ProducerBatch, plain_headers, size_of
from asyncproducer.core.bulk cimport Rows
from asyncproducer.core.delivery cimport Delivery, Waiter
from asyncproducer.core.partitioner cimport partition_for_key
from asyncproducer.net.buffer_pool cimport BufferPool, Share, Ticket


cdef extern from "Python.h":
    Py_ssize_t Py_REFCNT(object)
    # Of an OrderedDict as well.
    Py_ssize_t PyDict_GET_SIZE(PyObject *)

cdef class Intake
cdef class Breath
cdef class Wait
cdef enum:
    COMPILED = 1
cdef Py_ssize_t _BYTES_PER_TURN
cdef double _SECONDS_PER_TURN
cdef double _SECONDS_BESIDE_COMPRESSING
cdef Py_ssize_t _BYTES_PER_LOOK
cdef Py_ssize_t _BYTES_PER_RECORD
cdef Py_ssize_t _BYTES_PER_ROW
cdef Py_ssize_t _ROWS_AT_ONCE
cdef Py_ssize_t _REMEMBERED
cdef Py_ssize_t _GIVEN_PER_BREATH
cdef Py_ssize_t _MOST_IN_VAIN
cdef bytes NO_HEADERS

cdef extern from *:
    """
    #ifdef Py_GIL_DISABLED
    #define HAS_GIL 0
    #else
    #define HAS_GIL 1
    #endif
    """
    const bint HAS_GIL

cdef extern from *:
    """
    /* The processor's own counter. It is read without waiting for what comes before, which is most
       of what a clock takes; none in use as a clock counts slower than a quarter of a GHz. Another
       processor's may be behind: then it says that much has passed, and the clock is asked. */
    #if (defined(__x86_64__) || defined(__i386__)) && (defined(__GNUC__) || defined(__clang__))
    #define c_counter() ((unsigned long long)__builtin_ia32_rdtsc())
    #define MOST_NS_PER_COUNT 4
    #elif defined(_MSC_VER) && (defined(_M_X64) || defined(_M_IX86))
    #include <intrin.h>
    #define c_counter() ((unsigned long long)__rdtsc())
    #define MOST_NS_PER_COUNT 4
    #else
    /* Each time is asked for. */
    #define c_counter() 0ULL
    #define MOST_NS_PER_COUNT 1000001
    #endif
    """
    unsigned long long c_counter() noexcept nogil
    const long long MOST_NS_PER_COUNT

cdef extern from *:
    """
    /* Nearly each call of `enqueue` and `send` has topic and value, no more. It needs no look for
       what else it could have: for each of that, None's references would be counted up and down.
       All others are the function's own, which believes that its first argument is what it needs. */
    static vectorcallfunc whole_enqueue, whole_send;
    static PyTypeObject *front_type;
    static PyObject *(*plain_front)(PyObject *, PyObject *, PyObject *, int);

    static PyObject *call_front(
        int sends, PyObject *f, PyObject *const *args, size_t count, PyObject *names
    )
    {
        Py_ssize_t given = PyVectorcall_NARGS(count);
        if (given > 0 && Py_TYPE(args[0])->tp_base != front_type
            && !PyObject_TypeCheck(args[0], front_type)) {
            PyErr_Format(
                PyExc_TypeError, "%s() of a Producer got a '%.100s' in the place of the producer",
                sends ? "send" : "enqueue", Py_TYPE(args[0])->tp_name
            );
            return NULL;
        }
        if (given == 3 && names == NULL)
            return plain_front(args[0], args[1], args[2], sends);
        return (sends ? whole_send : whole_enqueue)(f, args, count, names);
    }

    static PyObject *call_enqueue(PyObject *f, PyObject *const *args, size_t count, PyObject *names)
    {
        return call_front(0, f, args, count, names);
    }

    static PyObject *call_send(PyObject *f, PyObject *const *args, size_t count, PyObject *names)
    {
        return call_front(1, f, args, count, names);
    }

    /* CPython's own place for how an object is called. */
    static vectorcallfunc replace_call(PyObject *type, const char *name, vectorcallfunc call)
    {
        vectorcallfunc *place, whole;
        PyObject *function = PyDict_GetItemString(((PyTypeObject *)type)->tp_dict, name);
        if (function == NULL || !PyType_HasFeature(Py_TYPE(function), Py_TPFLAGS_HAVE_VECTORCALL))
            return NULL;
        place = (vectorcallfunc *)((char *)function + Py_TYPE(function)->tp_vectorcall_offset);
        whole = *place;
        if (whole != NULL)
            *place = call;
        return whole;
    }

    static void install_calls(
        PyObject *front, PyObject *(*plain)(PyObject *, PyObject *, PyObject *, int)
    )
    {
        front_type = (PyTypeObject *)front;
        plain_front = plain;
        whole_enqueue = replace_call(front, "enqueue", call_enqueue);
        whole_send = replace_call(front, "send", call_send);
    }
    """
    void install_calls(object front, object (*plain)(object, object, object, bint))

cdef extern from *:
    """
    /* What `await` calls where a type has it, and the cheapest way to give it a value: Cython has
       no name for this slot. From CPython 3.12 on, `await` itself goes by `__next__`, which gives
       a value by StopIteration: raised by Python's words, it gets a traceback each time. */
    static PyTypeObject *entry_waiter_type, *entry_delivery_type, *entry_metadata_type;
    static PyObject *(*entry_begin)(PyObject *);
    static PyObject *no_arguments;

    static PySendResult go_on(PyObject *step, PyObject *value, PyObject **result)
    {
        PySendResult status;
        PyTypeObject *kind = Py_TYPE(step);
        if (kind == entry_waiter_type) {
            *result = step;
            return PYGEN_NEXT;
        }
        if (kind == entry_delivery_type || kind == entry_metadata_type) {
            *result = step;
            return PYGEN_RETURN;
        }
        status = PyIter_Send(step, value, result);
        Py_DECREF(step);
        return status;
    }

    static PySendResult entry_send(PyObject *self, PyObject *value, PyObject **result)
    {
        PyObject *step = entry_begin(self);
        if (step != NULL)
            return go_on(step, value, result);
        *result = NULL;
        return PYGEN_ERROR;
    }

    static PyStopIterationObject *new_stop(void)
    {
        /* To call the class would take twice as long. Who looks at `args` finds none. */
        return (PyStopIterationObject *)((PyTypeObject *)PyExc_StopIteration)->tp_new(
            (PyTypeObject *)PyExc_StopIteration, no_arguments, NULL
        );
    }

    /* NULL, as any function is that raises. */
    static PyObject *raise_stop(PyStopIterationObject *stop)
    {
    #if PY_VERSION_HEX >= 0x030C0000
        PyErr_SetRaisedException((PyObject *)stop);
    #else
        PyErr_SetObject(PyExc_StopIteration, (PyObject *)stop);
        Py_DECREF(stop);
    #endif
        return NULL;
    }

    /* The StopIteration that brought the last Delivery. It brings the next one too, if nobody has
       kept it or looked at it: to make one is a fifth of a record's way. */
    static PyObject *last_stop;

    /* Without what it has brought: a Delivery that nobody else has is used again as well. Nobody
       finds it while that is let go, which may be the end of a batch. */
    static PyStopIterationObject *take_stop(void)
    {
        PyStopIterationObject *stop = (PyStopIterationObject *)last_stop;
        if (stop == NULL)
            return NULL;
        last_stop = NULL;
        if (Py_REFCNT(stop) == 1 && stop->traceback == NULL && stop->context == NULL
            && stop->dict == NULL) {
            Py_CLEAR(stop->value);
            return stop;
        }
        Py_DECREF(stop);
        return NULL;
    }

    static void keep_stop(PyStopIterationObject *stop)
    {
    #if PY_VERSION_HEX >= 0x030C0000 && !defined(Py_GIL_DISABLED)
        if (last_stop == NULL) {
            last_stop = (PyObject *)stop;
            return;
        }
    #endif
        Py_DECREF(stop);
    }

    static void forget_stop(void)
    {
        Py_CLEAR(last_stop);
    }

    static PyObject *entry_next(PyObject *self)
    {
        PyStopIterationObject *stop = take_stop();
        PyObject *step = entry_begin(self);
        PyObject *result = NULL;
        if (step != NULL && Py_TYPE(step) == entry_delivery_type) {
            if (stop == NULL && (stop = new_stop()) == NULL) {
                Py_DECREF(step);
                return NULL;
            }
            stop->value = step;
            Py_INCREF(stop);
            keep_stop(stop);
            return raise_stop(stop);
        }
        if (stop != NULL)
            keep_stop(stop);
        if (step == NULL)
            return NULL;
        switch (go_on(step, Py_None, &result)) {
        case PYGEN_NEXT:
            return result;
        case PYGEN_ERROR:
            return NULL;
        default:
            break;
        }
        if ((stop = new_stop()) == NULL) {
            Py_DECREF(result);
            return NULL;
        }
        stop->value = result;
        return raise_stop(stop);
    }

    static void install_send(PyObject *entry, PyObject *waiter, PyObject *delivery,
                             PyObject *metadata, PyObject *(*begin)(PyObject *))
    {
        entry_begin = begin;
        entry_waiter_type = (PyTypeObject *)waiter;
        entry_delivery_type = (PyTypeObject *)delivery;
        entry_metadata_type = (PyTypeObject *)metadata;
        ((PyTypeObject *)entry)->tp_as_async->am_send = entry_send;
        if ((no_arguments = PyTuple_New(0)) != NULL)
            ((PyTypeObject *)entry)->tp_iternext = entry_next;
    }
    """
    void install_send(
        object entry, object waiter, object delivery, object metadata, object (*begin)(object)
    )
    void forget_stop()


cdef class Breath:
    cdef public bint _asyncio_future_blocking
    cdef object _loop
    cdef object _wakeup
    cdef object _context
    cdef readonly bint over

    cpdef object result(self)
    cpdef object get_loop(self)


cdef class Wait(Breath):
    cdef object _message
    cdef readonly Delivery delivery
    cdef readonly object error

    cpdef object result(self)
    cdef object give(self, Delivery delivery)
    cdef object refuse(self, object error)


cdef class Pending(Ticket):
    cdef readonly Intake intake
    cdef readonly str topic
    cdef public object partition
    cdef readonly long long timestamp
    cdef readonly object key
    cdef readonly object value
    cdef readonly bytes headers
    cdef readonly double deadline
    cdef public Py_ssize_t place
    cdef public TopicState state
    cdef public object timer
    cdef public Wait wait

    cpdef bint claim(self) except -1
    @cython.locals(accumulator=Accumulator, state=TopicState, place=Py_ssize_t, share=Share)
    cpdef Share share(self)
    cpdef object granted(self)
    cpdef object refused(self, object error)
    @cython.locals(
        intake=Intake, state=TopicState, delivery=Delivery, size=Py_ssize_t, place=Py_ssize_t
    )
    cdef bint _append(self, Py_ssize_t granted) except -1
    cpdef object resolve(self, Delivery delivery)
    cpdef object disarm(self)


@cython.final
cdef class Entry:
    cdef Intake _intake
    cdef object _topic
    cdef object _value
    cdef object _key
    cdef object _headers
    cdef object _partition
    cdef object _timestamp
    cdef object _inner
    cdef Waiter _waiter
    cdef bint _begun
    cdef bint _long
    cdef bint _sends

    @cython.locals(delivery=Delivery, waiter=Waiter)
    cdef object _begin(self)
    @cython.locals(intake=Intake)
    cdef Delivery _enter(self)
    @cython.locals(waiter=Waiter)
    cdef object _sleep(self)


@cython.locals(entry=Entry)
cdef inline Entry _new_entry(
    bint sends,
    Intake intake,
    object topic,
    object value,
    object key,
    object headers,
    object partition,
    object timestamp,
)

# What `Entry.send` does first, for install_send.
cdef inline object begin_entry(object step):
    return (<Entry>step)._begin()


cdef bint _is_late(object data)


cdef class Front:
    cdef public Intake _intake


# What Front's methods do with topic and value alone, for install_calls.
cdef inline object plain_call(object front, object topic, object value, bint sends):
    if (<Front>front)._intake is None:
        return front._not_yet()
    return _new_entry(sends, (<Front>front)._intake, topic, value, None, None, None, None)


@cython.final
cdef class Intake:
    cdef public Accumulator accumulator
    cdef public object loop_time
    cdef bint _open
    cdef bint _in_turn
    cdef bint _turns
    cdef unsigned long _thread
    cdef unsigned long long _counter
    cdef unsigned long long _ms_lasts
    cdef long long _ms
    cdef bint _plain_time
    cdef object _last_topic
    cdef TopicState _last_state
    cdef public Entry spare
    cdef public bint spent
    cdef bint _goes_round
    cdef set _had
    cdef object _had_last
    cdef object _breaths
    cdef object _given
    cdef public object partitioner
    cdef object _config
    cdef object _loop
    cdef object _metadata
    cdef object _cluster
    cdef BufferPool _pool
    cdef object _pool_line
    cdef object _pool_aside
    cdef object _scheduler
    cdef tuple _interceptors
    cdef object _key_serializer
    cdef object _value_serializer
    cdef bint _serializes
    cdef bint _async_serializers
    cdef bint _plain
    cdef object _check_usable
    cdef object _on_refused
    cdef public object on_lost
    cdef readonly Py_ssize_t openings
    cdef readonly Py_ssize_t serializing
    cdef bint _late
    cdef bint _pouring
    cdef object _on_metadata_wait
    cdef bint _hash_keys
    cdef double _max_block
    cdef Py_ssize_t _certain_size
    cdef dict _lines
    cdef dict _absent
    cdef object _declined
    cdef Py_ssize_t _taken
    cdef public Py_ssize_t turn_bytes
    cdef Py_ssize_t _look_at
    cdef double _turn_ends
    cdef double _turn_seconds
    cdef Py_ssize_t _settling
    cdef bint _settles
    cdef object __weakref__

    cpdef object enter(
        self,
        object topic,
        object value,
        object key,
        object headers,
        object partition,
        object timestamp,
        bint wait=*,
    )
    cdef object _enter(
        self,
        object topic,
        object value,
        object key,
        object headers,
        object partition,
        object timestamp,
        bint wait,
    )

    @cython.locals(
        headers=bytes,
        size=Py_ssize_t,
        state=TopicState,
        accumulator=Accumulator,
        delivery=Delivery,
        when=cython.longlong,
        place=Py_ssize_t,
    )
    cdef object _enter_bytes(
        self,
        object topic,
        object value,
        object key,
        object pairs,
        object partition,
        object timestamp,
        bint wait,
    )
    @cython.locals(
        accumulator=Accumulator,
        state=TopicState,
        batch=ProducerBatch,
        row=Py_ssize_t,
        place=Py_ssize_t,
        size=Py_ssize_t,
        end=Py_ssize_t,
        vain=Py_ssize_t,
    )
    cpdef Py_ssize_t enter_rows(self, Rows rows, Py_ssize_t first) except -1
    @cython.locals(delivery=Delivery)
    cdef bint _append_row(
        self, TopicState state, Py_ssize_t place, Rows rows, Py_ssize_t row
    ) except -1
    @cython.locals(accumulator=Accumulator, delivery=Delivery)
    cdef Delivery _append(
        self,
        TopicState state,
        Py_ssize_t place,
        long long when,
        object key,
        object value,
        bytes headers,
    )
    @cython.locals(accumulator=Accumulator, delivery=Delivery)
    cdef Delivery _append_now(
        self,
        TopicState state,
        Py_ssize_t place,
        long long when,
        object key,
        object value,
        bytes headers,
    )
    @cython.locals(accumulator=Accumulator)
    cdef object _after_news(self)
    cdef object _settle_soon(self)
    @cython.locals(
        state=TopicState,
        size=Py_ssize_t,
        place=Py_ssize_t,
        when=cython.longlong,
        accumulator=Accumulator,
        delivery=Delivery,
    )
    cdef Delivery enter_open(self, Entry entry)
    cdef bint _somebody_waits(self) noexcept
    cdef bint _may_pass(self, TopicState state, Py_ssize_t place) except -1
    cdef bint _here(self) noexcept
    @cython.locals(counter=cython.ulonglong, nanoseconds=cython.longlong)
    cdef long long _today(self) noexcept
    cdef double _now(self) except? -1
    @cython.locals(taken=Py_ssize_t)
    cdef bint _look(self) except -1
    cdef object _has_had(self, object task)
    cdef object _turn_soon(self)
    cdef object _forget(self)
    cdef object resume(self, Breath breath)
    cdef object resume_soon(self, Breath breath)
    @cython.locals(ends=double, least=Py_ssize_t)
    cdef object _go_on(self)
    cdef object _run(self, Breath breath)
    cpdef bint again(self) except -1


# How many topics and records wait. A name for each line would be counted, for each record.
cdef inline Py_ssize_t in_line(Intake intake) noexcept:
    return (
        PyDict_GET_SIZE(<PyObject *>intake._lines)
        + PyDict_GET_SIZE(<PyObject *>intake._pool_line)
        + PyDict_GET_SIZE(<PyObject *>intake._pool_aside)
    )
