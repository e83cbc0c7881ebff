# C types for buffer_pool.py, which reads the same without them. Under overload each record waits.
cimport cython


cdef class Ticket


cdef class Share:
    cdef readonly object node
    cdef public Py_ssize_t held
    cdef public object line
    cdef public Ticket called
    cdef public Py_ssize_t queues
    cdef public bint hurried

    cpdef bint is_waited_for(self)


cdef class Ticket:
    cdef public Py_ssize_t _asked
    cdef public Share _called
    cdef public Py_ssize_t _held
    cdef public double _deadline
    cdef public double _entered

    cpdef bint claim(self) except -1
    cpdef Share share(self)
    cpdef object granted(self)
    cpdef object refused(self, object error)


cdef class BufferPool:
    cdef readonly Py_ssize_t total
    cdef public Py_ssize_t available
    cdef public Py_ssize_t held
    cdef public Py_ssize_t exhausted
    cdef public double waited_seconds
    cdef public bint closed
    cdef object _loop
    cdef object _time
    cdef object _metrics
    cdef double _told_seconds
    cdef object _line
    cdef readonly dict _shares
    cdef dict _set_aside
    cdef bint _serving
    cdef object _resting
    cdef double _enough
    cdef readonly list _deadlines
    cdef object _order
    cdef readonly object _timer
    cdef double _timer_at

    @cython.locals(other=Share)
    cpdef bint is_held_up(self, Share share, Py_ssize_t size=*) except -1
    cpdef bint _waits(self, Ticket ticket) except -1
    @cython.locals(other=Share, more=Py_ssize_t, alone=bint)
    cdef bint _has_enough(self, Share share, Py_ssize_t size, bint spares=*) except -1
    cdef object _check(self, Py_ssize_t size)
    cpdef object serve(self)
    @cython.locals(ticket=Ticket, given=Py_ssize_t, claimed=bint)
    cpdef bint _serve_head(self) except -1
    @cython.locals(share=Share, called=Share)
    cdef bint _steps_aside(self, Ticket ticket) except -1
    @cython.locals(share=Share, ticket=Ticket, claimed=bint)
    cdef bint _call_back(self) except -1
    @cython.locals(share=Share)
    cdef object _take_out(self, Ticket ticket)
    cdef object _remove(self, Ticket ticket, double now)
    cdef object _tell_waits(self)
    cdef object _count_exhausted(self, double now)
    cpdef bint _claim(self, Ticket ticket) except -1
    @cython.locals(size=Py_ssize_t)
    cpdef object _grant(self, Ticket ticket)
    cpdef object _refuse(self, Ticket ticket, object error)
    cdef object _watch(self, Ticket ticket)
    @cython.locals(deadline=double, ticket=Ticket)
    cdef bint _is_live(self, tuple entry) except -1
