"""Events to their end: requests arrive, steps complete, what a device does next."""

from __future__ import annotations

from mmctl.engine.schedule.layout import (
    BLOCK_TOKENS,
    DECODE,
    FREE,
    HEAP,
    LOGGED,
    MORE_LOG,
    MORE_RECORDS,
    NEXT,
)

from . import jit
from .cache import give_back
from .heap import pop, push
from .lists import arrive, enter, keep, leave, queue_class
from .placing import choose, encoded, route
from .step import schedule

NEVER = 1e300


@jit
def complete(f, p, s, ring, d, now):  # type: ignore[no-untyped-def]
    """The step that ran on ``d`` has ended: first tokens, finished requests, free blocks."""
    step = s.device[d].executed + 1
    s.device[d].executed = step
    s.device[d].executing = 0
    parity = 2 * d + step % 2
    r = s.queue[parity].encoded_head
    s.queue[parity].encoded_head = -1
    while r >= 0:
        after = s.job[r].step_next
        encoded(f, p, s, d, r, now)
        r = after
    r = s.queue[parity].first_head
    s.queue[parity].first_head = -1
    while r >= 0:
        if s.job[r].first_s < 0:
            s.job[r].first_s = now
        r = s.job[r].step_next
    at = d * ring + step % ring
    r = s.due_head[at]
    s.due_head[at] = -1
    while r >= 0:
        after = s.job[r].due_next
        context = s.job[r].since_context + step - s.job[r].since
        give_back(f, s, d, r, (context + BLOCK_TOKENS - 1) // BLOCK_TOKENS)
        s.device[d].outstanding -= 1
        done = s.job[r].since_done + step - s.job[r].since
        s.job[r].done = done
        s.job[r].since = -1
        if done >= s.job[r].output:
            s.job[r].finish_s = now
            keep(p, s, r)
        else:
            # Prefilled here, decoded elsewhere: the KV cache goes over the link.
            to = choose(f, p, s, r, DECODE, now)
            s.job[r].device = to
            s.job[r].context_ready = 1
            s.job[r].prefix_count = 0
            s.device[to].outstanding += 1
            s.device[to].waiting_tokens += s.job[r].text + s.job[r].vision + done
            push(s, now + f.device[d].latency_s + context * f.device[d].kv_s, len(f.device) + r)
        r = after


@jit
def advance(f, p, s, ring, d, now):  # type: ignore[no-untyped-def]
    """Start the step that is planned on ``d``, and plan the one after where it runs ahead."""
    r = s.device[d].seen_head
    s.device[d].seen_head = -1
    while r >= 0:
        if s.job[r].seen_s < 0:
            s.job[r].seen_s = now
        r = s.job[r].seen_next
    took_s = s.device[d].planned_s
    if took_s == 0.0:
        took_s = schedule(f, p, s, ring, d, now)
    s.device[d].planned_s = 0.0
    if took_s == 0.0:
        return
    s.device[d].executing = 1
    if p.log:
        s.log.start_s[s.device[d].entry] = now
    push(s, now + took_s, d)
    if f.device[d].lag:
        s.device[d].planned_s = schedule(f, p, s, ring, d, now)


@jit
def run(q, f, p, s, ring):  # type: ignore[no-untyped-def]
    """Simulate ``q``; results stand in ``s``. Returns the time of the last event, or what has to
    be made longer before it is called again: MORE_RECORDS of requests, or MORE_LOG.
    """
    count, devices = len(q.arrival_s), len(f.device)
    i = s.counters[NEXT]
    now = 0.0
    while True:
        if p.log and s.counters[LOGGED] + 2 > len(s.log.device):
            return MORE_LOG
        coming = q.arrival_s[i] if i < count else NEVER
        if s.counters[HEAP] > 0 and s.heap_s[0] <= coming:
            now = s.heap_s[0]
            what = s.heap_what[0]
            pop(s)
            if what < devices:
                complete(f, p, s, ring, what, now)
                wake = what
            else:
                r = what - devices
                wake = s.job[r].device
                arrive(p, s, wake, r, queue_class(p, s, r))
        elif i < count:
            if s.counters[FREE] < 0:
                return MORE_RECORDS
            now = coming
            r = enter(q, s, i)
            wake = route(f, p, s, r, now)
            if wake < 0:
                leave(s, r)
            i += 1
            s.counters[NEXT] = i
        else:
            break
        if wake >= 0 and not s.device[wake].executing:
            advance(f, p, s, ring, wake, now)
    return now
