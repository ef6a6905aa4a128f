"""The linked lists that requests stand in, and the records that they take while under way."""

from __future__ import annotations

from mmctl.engine.schedule.layout import FREE, PREFIX_TOKENS

from . import jit


@jit
def line_up(s, d, c, r):  # type: ignore[no-untyped-def]
    """``r`` to the end of the waiting queue ``c`` of device ``d``."""
    q = 2 * d + c
    s.job[r].queue_next = -1
    if s.queue[q].queue_head < 0:
        s.queue[q].queue_head = r
    else:
        s.job[s.queue[q].queue_tail].queue_next = r
    s.queue[q].queue_tail = r
    s.queue[q].queue_count += 1
    if s.job[r].vision == 0:
        s.device[d].waiting_text += 1


@jit
def line_up_encode(s, d, c, r):  # type: ignore[no-untyped-def]
    """Put ``r`` at the end of queue ``c`` of those that wait for device ``d``'s encoder."""
    q = 2 * d + c
    s.job[r].queue_next = -1
    if s.queue[q].encode_head < 0:
        s.queue[q].encode_head = r
    else:
        s.job[s.queue[q].encode_tail].queue_next = r
    s.queue[q].encode_tail = r
    s.queue[q].encode_count += 1


@jit
def drop_run(s, d, r):  # type: ignore[no-untyped-def]
    """``r`` out of the list of what runs on ``d``."""
    before, after = s.job[r].run_previous, s.job[r].run_next
    if before >= 0:
        s.job[before].run_next = after
    if after < 0:
        s.device[d].run_tail = before
    else:
        s.job[after].run_previous = before


@jit
def drop_due(s, d, ring, r):  # type: ignore[no-untyped-def]
    """``r`` out of the list of the step that would have finished it."""
    before, after = s.job[r].due_previous, s.job[r].due_next
    if before < 0:
        s.due_head[d * ring + s.job[r].finish_step % ring] = after
    else:
        s.job[before].due_next = after
    if after >= 0:
        s.job[after].due_previous = before


@jit
def set_due(s, d, ring, r, step):  # type: ignore[no-untyped-def]
    """Note that ``r`` ends with ``step`` on device ``d``, in its ring of coming steps."""
    at = d * ring + step % ring
    head = s.due_head[at]
    s.job[r].finish_step = step
    s.job[r].due_next = head
    s.job[r].due_previous = -1
    if head >= 0:
        s.job[head].due_previous = r
    s.due_head[at] = r


@jit
def queue_class(p, s, r):  # type: ignore[no-untyped-def]
    """0 is the queue of text, 1 that of vision; without queues by modality all stand in 0."""
    return 1 if p.by_modality and s.job[r].vision > 0 else 0


@jit
def arrive(p, s, d, r, c):  # type: ignore[no-untyped-def]
    """``r`` stands before the prefill or decode of ``d``, to be seen when its step ends."""
    s.job[r].seen_next = s.device[d].seen_head
    s.device[d].seen_head = r
    line_up(s, d, c, r)


@jit
def enter(q, s, i):  # type: ignore[no-untyped-def]
    """Request ``i`` takes a free record; returns its place."""
    r = s.counters[FREE]
    s.counters[FREE] = s.job[r].queue_next
    s.job[r].id = i
    s.job[r].arrival_s = q.arrival_s[i]
    s.job[r].text = q.text[i]
    s.job[r].vision = q.vision[i]
    s.job[r].images = q.images[i]
    s.job[r].patches = q.patches[i]
    s.job[r].output = q.output[i]
    s.job[r].seen_s = -1.0
    s.job[r].encoded_s = -1.0
    s.job[r].started_s = -1.0
    s.job[r].first_s = -1.0
    s.job[r].finish_s = -1.0
    s.job[r].encoder = -1
    s.job[r].prefiller = -1
    s.job[r].device = -1
    s.job[r].preempted = 0
    s.job[r].images_left = 0
    s.job[r].done = 0
    s.job[r].computed = 0
    s.job[r].context_ready = 0
    s.job[r].since = -1
    s.job[r].cached_blocks = 0
    s.job[r].reused = 0
    s.job[r].reused_images = 0
    s.job[r].prefix_count = 0
    s.job[r].images_named = 0
    if len(q.prefix_at) > 0:
        s.job[r].prefix_at = q.prefix_at[i]
        named = q.prefix_at[i + 1] - q.prefix_at[i]
        s.job[r].prefix_count = min(named, (q.text[i] + q.vision[i]) // PREFIX_TOKENS)
    if len(q.image_at) > 0:
        s.job[r].image_at = q.image_at[i]
        s.job[r].images_named = min(q.image_at[i + 1] - q.image_at[i], q.images[i])
    return r


@jit
def keep(p, s, r):  # type: ignore[no-untyped-def]
    """What is told of a request that is over goes to the results; its record is free again."""
    i = s.job[r].id
    s.result.seen_s[i] = s.job[r].seen_s
    s.result.encoded_s[i] = s.job[r].encoded_s
    s.result.started_s[i] = s.job[r].started_s
    s.result.first_s[i] = s.job[r].first_s
    s.result.finish_s[i] = s.job[r].finish_s
    s.result.encoder[i] = s.job[r].encoder
    s.result.prefiller[i] = s.job[r].prefiller
    s.result.device[i] = s.job[r].device
    s.result.preempted[i] = s.job[r].preempted
    s.result.reused[i] = s.job[r].reused
    s.result.reused_images[i] = s.job[r].reused_images
    if p.receipts:
        s.result.cost_s[i] = s.job[r].cost_s
        s.result.second[i] = s.job[r].second
        s.result.second_s[i] = s.job[r].second_s
    leave(s, r)


@jit
def leave(s, r):  # type: ignore[no-untyped-def]
    """Give the row of the finished request ``r`` back."""
    s.job[r].queue_next = s.counters[FREE]
    s.counters[FREE] = r
