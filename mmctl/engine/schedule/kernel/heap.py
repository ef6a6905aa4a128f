"""Events in order of time: a binary heap in three columns, as Python and numba both run it."""

from __future__ import annotations

from mmctl.engine.schedule.layout import HEAP, ORDER

from . import jit


@jit
def push(s, time_s, what):  # type: ignore[no-untyped-def]
    """An event into the heap; of two at one time the older goes first."""
    order = s.counters[ORDER] + 1
    s.counters[ORDER] = order
    i = s.counters[HEAP]
    s.counters[HEAP] = i + 1
    while i > 0:
        above = (i - 1) >> 1
        if s.heap_s[above] <= time_s:
            break
        s.heap_s[i] = s.heap_s[above]
        s.heap_order[i] = s.heap_order[above]
        s.heap_what[i] = s.heap_what[above]
        i = above
    s.heap_s[i] = time_s
    s.heap_order[i] = order
    s.heap_what[i] = what


@jit
def pop(s):  # type: ignore[no-untyped-def]
    """Remove the first event of the heap."""
    last = s.counters[HEAP] - 1
    s.counters[HEAP] = last
    time_s, order, what = s.heap_s[last], s.heap_order[last], s.heap_what[last]
    i = 0
    while True:
        child = 2 * i + 1
        if child >= last:
            break
        right = child + 1
        if right < last and (
            s.heap_s[right] < s.heap_s[child]
            or (s.heap_s[right] == s.heap_s[child] and s.heap_order[right] < s.heap_order[child])
        ):
            child = right
        if time_s < s.heap_s[child] or (time_s == s.heap_s[child] and order < s.heap_order[child]):
            break
        s.heap_s[i] = s.heap_s[child]
        s.heap_order[i] = s.heap_order[child]
        s.heap_what[i] = s.heap_what[child]
        i = child
    s.heap_s[i] = time_s
    s.heap_order[i] = order
    s.heap_what[i] = what
