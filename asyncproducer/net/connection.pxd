# C types for connection.py: its attributes are where a request spends its time.
cimport cython

from asyncproducer.core.metrics cimport Metrics
from asyncproducer.net.frames cimport FrameReader
from asyncproducer.net.in_flight cimport InFlight, Pending
from asyncproducer.net.outbox cimport Outbox
from asyncproducer.net.unwritten cimport Unwritten


cdef object _READY
cdef object _CLOSED
cdef Py_ssize_t _BYTES_AT_ONCE
cdef double _SECONDS_AT_ONCE
cdef Py_ssize_t _LARGE_BYTES


cdef class Connection:
    # Tests put their own methods into one.
    cdef dict __dict__
    cdef object __weakref__
    cdef public object node
    cdef public object versions
    cdef public object finalized_features
    cdef public object finalized_features_epoch
    cdef public double last_used
    cdef public double round_trip
    cdef public object _config
    cdef public object _connector
    cdef public object _client_id
    cdef public object _loop
    cdef public object _time
    cdef public object _on_closed
    cdef public object _on_room
    cdef public Metrics _metrics
    cdef public object _ssl_context
    cdef public object _random
    cdef public Py_ssize_t _max_in_flight
    cdef public double _request_timeout
    cdef public object _state
    cdef public object _reason
    cdef public object _transport
    cdef public FrameReader _frames
    cdef public InFlight _in_flight
    cdef public Unwritten _unwritten
    cdef public Outbox _outbox
    cdef public bint _paused
    cdef public Py_ssize_t _allowance
    cdef public double _writing
    cdef public bint _turning
    cdef public Py_ssize_t _correlation_id
    cdef public Py_ssize_t _sasl_id
    cdef public double _throttled_until
    cdef public object _throttle_timer
    cdef public object _renew_at
    cdef public object _session_timer
    cdef public object _close_timer
    cdef public object _reauthentication
    cdef public bint _draining
    cdef public object _drained
    cdef public Py_ssize_t _answers
    cdef public object _gone
    cdef public object _name

    cpdef bint can_send(self, double now) except -1
    cdef object _check_room(self)
    cdef object _live_transport(self)
    cdef object _write(
        self,
        object api_key,
        object version,
        object correlation_id,
        object buffers,
        double timeout,
        object on_done,
    )
    @cython.locals(size=Py_ssize_t)
    cdef object _hand_over(self, object transport, object buffers)
    @cython.locals(
        outbox=Outbox,
        before=Py_ssize_t,
        large=cython.bint,
        began=double,
        now=double,
        piece=list,
    )
    cdef object _write_pieces(self, object transport)
    cdef object _write_on(self, object transport)
    cpdef object _data_received(self, object data)
    @cython.locals(request=Pending)
    cdef object _frame_received(self, object received)
