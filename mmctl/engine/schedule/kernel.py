"""The simulation's loop: continuous batching on each device, one event a step.

A step of a device encodes images, prefills chunks and decodes one token of every running
sequence, by the rules of vLLM's scheduler: running first, then waiting in order; a prompt is
admitted when all its blocks fit; the youngest running one is preempted and computed again when
no block is left. ``lag`` 1 is asynchronous scheduling: a step is put together while the one
before still runs. A step costs O(1), not O(batch): sums over the running sequences are kept,
and a sequence stands in the list of the step that will finish it.

The same source runs as Python on lists and, through ``compiled``, as machine code on arrays;
both do the same arithmetic in the same order.
"""

from __future__ import annotations

import math
from typing import Any

from mmctl.engine.schedule.layout import (
    BLOCK_TOKENS,
    CHUNKS,
    CONTEXTS,
    DECODE,
    ENCODE,
    FREE,
    HEAP,
    IMAGES,
    JSQ_REQUESTS,
    JSQ_TOKENS,
    NEXT,
    ORDER,
    PATCHES,
    PERCEPTION,
    POWER_OF_TWO,
    PREFILL,
    RANDOM,
    REFUSED,
    ROUND,
    ROUND_ENCODE,
    ROUND_ROBIN,
    SEED,
    SEQUENCES,
)

jit: Any = globals().get("jit", lambda function: function)

N_CHUNKS, N_CONTEXTS, N_SEQUENCES = len(CHUNKS), len(CONTEXTS), len(SEQUENCES)
N_IMAGES, N_PATCHES = len(IMAGES), len(PATCHES)
PER_MODEL = N_CHUNKS * N_CONTEXTS * N_SEQUENCES * N_CONTEXTS
NEVER = 1e300


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


@jit
def cell(x, first, least, size):  # type: ignore[no-untyped-def]
    """Where ``x`` lies in a grid that doubles from ``least`` on at index ``first``: the lower
    index and the share of the upper one. Beyond the grid its last cell goes on."""
    if x < least:
        if first == 0:
            return 0, 0.0
        return 0, x / least
    i = int(math.log2(x / least))
    if i > size - first - 2:
        i = size - first - 2
    low = least * (1 << i)
    return first + i, (x - low) / low


@jit
def attention(f, model, chunk, before, sequences, context):  # type: ignore[no-untyped-def]
    """Seconds of all attention layers in one step, linear between the cells of the table."""
    base = model * PER_MODEL
    i, u = 0, 0.0
    j, v = 0, 0.0
    k, w = 0, 0.0
    m, z = 0, 0.0
    if chunk > 0:
        i, u = cell(chunk, 1, 16.0, N_CHUNKS)
        j, v = cell(before, 1, 16.0, N_CONTEXTS)
    if sequences > 0:
        k, w = cell(sequences, 1, 1.0, N_SEQUENCES)
        m, z = cell(context, 1, 16.0, N_CONTEXTS)
    total = 0.0
    for a in range(2 if chunk > 0 else 1):
        wa = (u if a else 1.0 - u) if chunk > 0 else 1.0
        for b in range(2 if chunk > 0 else 1):
            wb = wa * ((v if b else 1.0 - v) if chunk > 0 else 1.0)
            if wb == 0.0:
                continue
            at = base + ((i + a) * N_CONTEXTS + j + b) * N_SEQUENCES * N_CONTEXTS
            if sequences > 0:
                row = at + k * N_CONTEXTS + m
                low = (1.0 - z) * f.attention_s[row] + z * f.attention_s[row + 1]
                row += N_CONTEXTS
                high = (1.0 - z) * f.attention_s[row] + z * f.attention_s[row + 1]
                total += wb * ((1.0 - w) * low + w * high)
            else:
                total += wb * f.attention_s[at]
    return max(total, 0.0)


@jit
def encoding(f, model, images, patches):  # type: ignore[no-untyped-def]
    """Seconds to encode ``images`` of ``patches`` each as one batch."""
    i, u = cell(images, 0, 1.0, N_IMAGES)
    j, v = cell(patches, 0, 16.0, N_PATCHES)
    row = model * N_IMAGES * N_PATCHES + i * N_PATCHES + j
    low = (1.0 - v) * f.encode_s[row] + v * f.encode_s[row + 1]
    row += N_PATCHES
    high = (1.0 - v) * f.encode_s[row] + v * f.encode_s[row + 1]
    return (1.0 - u) * low + u * high


@jit
def chance(s):  # type: ignore[no-untyped-def]
    """A number in [0, 1) from a 31-bit linear congruence: the same in Python and compiled."""
    state = (s.counters[SEED] * 1103515245 + 12345) & 0x7FFFFFFF
    s.counters[SEED] = state
    return (state >> 8) / 8388608.0


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
    if before < 0:
        s.device[d].run_head = after
    else:
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
def preempt(p, s, d, ring, step):  # type: ignore[no-untyped-def]
    """The youngest running sequence gives its blocks back and goes to the head of its queue."""
    r = s.device[d].run_tail
    drop_run(s, d, r)
    s.device[d].running -= 1
    s.job[r].preempted += 1
    c = queue_class(p, s, r)
    s.job[r].cached_from = s.device[d].taken + s.device[d].free
    if s.job[r].since < 0:
        s.queue[2 * d + c].partial = -1
        prompt = s.job[r].text + s.job[r].vision + s.job[r].done
        s.device[d].free += (prompt + BLOCK_TOKENS - 1) // BLOCK_TOKENS
        s.device[d].waiting_tokens += s.job[r].computed
        s.job[r].cached_blocks = s.job[r].computed // BLOCK_TOKENS
    else:
        context = s.job[r].since_context + step - 1 - s.job[r].since
        s.device[d].free += (context + BLOCK_TOKENS - 1) // BLOCK_TOKENS
        s.job[r].cached_blocks = context // BLOCK_TOKENS
        s.device[d].decoding -= 1
        s.device[d].context -= context + 1
        s.growth[
            d * BLOCK_TOKENS + (s.job[r].since - s.job[r].since_context + 1) % BLOCK_TOKENS
        ] -= 1
        drop_due(s, d, ring, r)
        s.job[r].done = s.job[r].since_done + step - 1 - s.job[r].since
        s.device[d].waiting_tokens += s.job[r].text + s.job[r].vision + s.job[r].done
    s.job[r].since = -1
    s.job[r].computed = 0
    s.job[r].context_ready = 0
    at = 2 * d + c
    s.job[r].queue_next = s.queue[at].queue_head
    s.queue[at].queue_head = r
    if s.job[r].queue_next < 0:
        s.queue[at].queue_tail = r
    s.queue[at].queue_count += 1
    if s.job[r].vision == 0:
        s.device[d].waiting_text += 1


@jit
def cached(f, s, d, r, whole):  # type: ignore[no-untyped-def]
    """Tokens of a preempted ``r`` whose blocks nobody has taken yet: the prefix cache.

    Free blocks are taken oldest first, and those of one request from its end on, so that what
    is left of it is a prefix.
    """
    if not f.device[d].prefix or s.job[r].cached_blocks == 0:
        return 0
    lost = max(0, s.device[d].taken - s.job[r].cached_from)
    left = max(0, s.job[r].cached_blocks - lost)
    return min(left, (whole - 1) // BLOCK_TOKENS) * BLOCK_TOKENS


@jit
def start_decode(s, d, ring, r, step, context, done):  # type: ignore[no-untyped-def]
    """``r`` has ``done`` tokens after ``step`` and ``context`` tokens in its blocks."""
    s.job[r].since = step
    s.job[r].since_context = context
    s.job[r].since_done = done
    set_due(s, d, ring, r, step + s.job[r].output - done)


@jit
def join(s, d, r):  # type: ignore[no-untyped-def]
    """``r`` decodes from the next step on (or from this one, for work that came with its KV)."""
    s.device[d].decoding += 1
    s.device[d].context += s.job[r].since_context + 1
    s.growth[d * BLOCK_TOKENS + (s.job[r].since - s.job[r].since_context + 1) % BLOCK_TOKENS] += 1


@jit
def encode_batch(f, p, s, d, step, now):  # type: ignore[no-untyped-def]
    """Images of one step from the encoder's queues: seconds, or 0 when none waits.

    Small jobs go first unless a large one has waited too long; a micro-batch is of one size,
    within a factor of two, where policies tell modalities apart.
    """
    limit = p.encode_images
    shared = f.device[d].role & (PREFILL | DECODE)
    count, total, size = 0, 0, 0
    while count < limit:
        c = 0
        small, large = s.queue[2 * d].encode_head, s.queue[2 * d + 1].encode_head
        if small < 0 or (large >= 0 and now - s.job[large].arrival_s > p.age_s):
            c = 1 if large >= 0 else 0
        r = s.queue[2 * d + c].encode_head
        if r < 0:
            break
        patches = s.job[r].patches
        if size > 0 and p.by_modality and (patches > 2 * size or size > 2 * patches):
            break
        room = limit - count
        if shared:
            left = (p.encode_patches - total) // max(patches, 1)
            if left <= 0 and count > 0:
                break
            room = min(room, max(left, 1))
        take = min(s.job[r].images_left, room)
        if s.job[r].started_s < 0:
            s.job[r].started_s = now
        count += take
        total += take * patches
        size = patches
        s.job[r].images_left -= take
        if s.job[r].images_left > 0:
            break
        at = 2 * d + c
        s.queue[at].encode_head = s.job[r].queue_next
        s.queue[at].encode_count -= 1
        s.job[r].step_next = s.queue[2 * d + step % 2].encoded_head
        s.queue[2 * d + step % 2].encoded_head = r
    if count == 0:
        return 0.0
    return encoding(f, f.device[d].model, count, total / count)


@jit
def schedule(f, p, s, ring, d, now):  # type: ignore[no-untyped-def]
    """Put the next step of ``d`` together: its seconds, or 0 when there is nothing to do."""
    step = s.device[d].scheduled + 1
    model = f.device[d].model
    encode_s = 0.0
    if s.queue[2 * d].encode_head >= 0 or s.queue[2 * d + 1].encode_head >= 0:
        encode_s = encode_batch(f, p, s, d, step, now)
    budget = f.device[d].budget
    held_back = False
    if s.device[d].decoding > 0:
        at = d * BLOCK_TOKENS + step % BLOCK_TOKENS
        while s.growth[at] > s.device[d].free:
            preempt(p, s, d, ring, step)
            held_back = True
        s.device[d].free -= s.growth[at]
        s.device[d].taken += s.growth[at]
        budget -= s.device[d].decoding
    chunks, work, prompts = 0, 0.0, 0
    inline_images, inline_patches = 0, 0
    for turn in range(2):
        c = turn
        vision = s.queue[2 * d + 1].queue_head
        if vision >= 0 and now - s.job[vision].arrival_s > p.age_s:
            c = 1 - turn
        at = 2 * d + c
        r = s.queue[at].partial
        if r >= 0 and budget > 0:
            whole = s.job[r].text + s.job[r].vision + s.job[r].done
            chunk = min(whole - s.job[r].computed, budget)
            budget -= chunk
            chunks += chunk
            work += chunk * (s.job[r].computed + 0.5 * chunk)
            prompts += 1
            s.job[r].computed += chunk
            s.device[d].waiting_tokens -= chunk
            if s.job[r].computed == whole:
                s.queue[at].partial = -1
                s.job[r].step_next = s.queue[2 * d + step % 2].first_head
                s.queue[2 * d + step % 2].first_head = r
        while not held_back and budget > 0 and s.device[d].running < f.device[d].sequences:
            r = s.queue[at].queue_head
            if r < 0 or s.queue[at].partial >= 0:
                break
            whole = s.job[r].text + s.job[r].vision + s.job[r].done
            need = (whole + BLOCK_TOKENS - 1) // BLOCK_TOKENS
            if need > s.device[d].free:
                break
            if s.job[r].images_left > 0:
                if s.job[r].started_s < 0:
                    s.job[r].started_s = now
                patches = max(s.job[r].patches, 1)
                room = (p.encode_patches - inline_patches) // patches
                if room <= 0:
                    if inline_images > 0:
                        break
                    room = 1
                take = min(s.job[r].images_left, room)
                s.job[r].images_left -= take
                inline_images += take
                inline_patches += take * patches
                if s.job[r].images_left > 0:
                    break
                s.job[r].encoded_s = now
            s.queue[at].queue_head = s.job[r].queue_next
            s.queue[at].queue_count -= 1
            if s.job[r].vision == 0:
                s.device[d].waiting_text -= 1
            if s.job[r].started_s < 0:
                s.job[r].started_s = now
            reused = cached(f, s, d, r, whole)
            s.device[d].free -= need
            s.device[d].taken += need - reused // BLOCK_TOKENS
            s.device[d].running += 1
            tail = s.device[d].run_tail
            s.job[r].run_previous = tail
            s.job[r].run_next = -1
            if tail < 0:
                s.device[d].run_head = r
            else:
                s.job[tail].run_next = r
            s.device[d].run_tail = r
            if s.job[r].context_ready:
                s.device[d].waiting_tokens -= whole
                start_decode(s, d, ring, r, step - 1, whole - 1, s.job[r].done)
                join(s, d, r)
                budget -= 1
                continue
            chunk = min(whole - reused, budget)
            budget -= chunk
            chunks += chunk
            work += chunk * (reused + 0.5 * chunk)
            prompts += 1
            s.job[r].computed = reused + chunk
            s.device[d].waiting_tokens -= reused + chunk
            if s.job[r].computed == whole:
                s.job[r].step_next = s.queue[2 * d + step % 2].first_head
                s.queue[2 * d + step % 2].first_head = r
            else:
                s.queue[at].partial = r
    if inline_images > 0:
        encode_s += encoding(f, model, inline_images, inline_patches / inline_images)
    decoding = s.device[d].decoding
    tokens = chunks + decoding
    llm_s = 0.0
    if tokens > 0:
        context = s.device[d].context / decoding if decoding else 0.0
        before = max(0.0, work / chunks - 0.5 * chunks) if chunks else 0.0
        llm_s = (
            f.dense_s[model * f.dense_width + min(tokens, f.dense_width - 1)]
            + f.head_s[model * f.head_width + min(decoding + prompts, f.head_width - 1)]
            + attention(f, model, chunks, before, decoding, context)
        )
    if encode_s == 0.0 and tokens == 0:
        return 0.0
    s.device[d].scheduled = step
    s.device[d].steps += 1
    s.device[d].encode_busy_s += encode_s
    if tokens > 0:
        s.device[d].prefill_busy_s += (llm_s + f.device[d].host_s) * chunks / tokens
        s.device[d].decode_busy_s += (llm_s + f.device[d].host_s) * decoding / tokens
    if encode_s > 0.0:
        s.device[d].blocking_s += encode_s * s.device[d].waiting_text
    # Who leaves after this step, who decodes from the next one on.
    r = s.due_head[d * ring + step % ring]
    while r >= 0:
        drop_run(s, d, r)
        s.device[d].running -= 1
        s.device[d].decoding -= 1
        s.device[d].context -= s.job[r].since_context + step - s.job[r].since
        s.growth[
            d * BLOCK_TOKENS + (s.job[r].since - s.job[r].since_context + 1) % BLOCK_TOKENS
        ] -= 1
        r = s.job[r].due_next
    s.device[d].context += s.device[d].decoding
    r = s.queue[2 * d + step % 2].first_head
    while r >= 0:
        after = s.job[r].step_next
        whole = s.job[r].text + s.job[r].vision + s.job[r].done
        if f.device[d].role & DECODE and s.job[r].done + 1 < s.job[r].output:
            start_decode(s, d, ring, r, step, whole, s.job[r].done + 1)
            join(s, d, r)
        else:
            s.job[r].since = step
            s.job[r].since_context = whole
            s.job[r].since_done = s.job[r].done + 1
            set_due(s, d, ring, r, step)
            drop_run(s, d, r)
            s.device[d].running -= 1
        r = after
    return encode_s + llm_s + f.device[d].host_s


@jit
def arrive(p, s, d, r, c):  # type: ignore[no-untyped-def]
    """``r`` stands before the prefill or decode of ``d``, to be seen when its step ends."""
    s.job[r].seen_next = s.device[d].seen_head
    s.device[d].seen_head = r
    line_up(s, d, c, r)


@jit
def encoded(f, p, s, d, r, now):  # type: ignore[no-untyped-def]
    """All images of ``r`` are encoded: on to the device that prefills it, over the link."""
    s.job[r].encoded_s = now
    s.device[d].encode_outstanding -= 1
    s.device[d].encode_waiting_s -= s.job[r].images * encoding(
        f, f.device[d].model, 1, s.job[r].patches
    )
    to = s.job[r].device
    if to == d:
        arrive(p, s, d, r, queue_class(p, s, r))
        return
    took_s = f.device[d].latency_s + s.job[r].vision * f.device[d].embedding_s
    push(s, now + took_s, len(f.device) + r)


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
    s.job[r].device = -1
    s.job[r].preempted = 0
    s.job[r].images_left = 0
    s.job[r].done = 0
    s.job[r].computed = 0
    s.job[r].context_ready = 0
    s.job[r].since = -1
    s.job[r].cached_blocks = 0
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
    s.result.device[i] = s.job[r].device
    s.result.preempted[i] = s.job[r].preempted
    if p.receipts:
        s.result.cost_s[i] = s.job[r].cost_s
        s.result.second[i] = s.job[r].second
        s.result.second_s[i] = s.job[r].second_s
    leave(s, r)


@jit
def leave(s, r):  # type: ignore[no-untyped-def]
    s.job[r].queue_next = s.counters[FREE]
    s.counters[FREE] = r


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
        s.device[d].free += (context + BLOCK_TOKENS - 1) // BLOCK_TOKENS
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
    push(s, now + took_s, d)
    if f.device[d].lag:
        s.device[d].planned_s = schedule(f, p, s, ring, d, now)


@jit
def expected_s(f, p, s, r, d, stage):  # type: ignore[no-untyped-def]
    """Seconds that ``r`` would spend on ``d``, from what stands there now.

    Divided by the perception weight of SPEC B2, (1 - compute use) (1 - bandwidth use), which
    breaks ties between devices that are equally near; floored, since it is 0 when all are busy.
    """
    model = f.device[d].model
    if stage == ENCODE:
        own = s.job[r].images * encoding(f, model, 1, s.job[r].patches)
        wait = s.device[d].encode_waiting_s + own
        if f.device[d].role & DECODE:
            wait += (
                s.device[d].waiting_tokens
                * f.dense_s[model * f.dense_width + f.dense_width - 1]
                / (f.dense_width - 1)
            )
        return wait
    whole = s.job[r].text + s.job[r].vision
    token_s = f.dense_s[model * f.dense_width + f.dense_width - 1] / (f.dense_width - 1)
    prefill_s = (s.device[d].waiting_tokens + (whole if stage == PREFILL else 0)) * token_s
    batch = min(s.device[d].outstanding + 1, f.device[d].sequences)
    step_s = (
        f.dense_s[model * f.dense_width + min(batch, f.dense_width - 1)]
        + attention(f, model, 0, 0.0, batch, whole)
        + f.device[d].host_s
    )
    decode_s = p.output_mean * step_s if f.device[d].role & DECODE else 0.0
    short = (s.device[d].waiting_tokens + whole) / BLOCK_TOKENS - s.device[d].free
    if short > 0 and f.device[d].role & DECODE:
        decode_s += decode_s * short / f.device[d].blocks * 2.0
    if f.device[d].role & ENCODE:
        prefill_s += s.device[d].encode_waiting_s
    busy = 0.5 if s.device[d].executing else 0.0
    used = 1.0 - s.device[d].free / f.device[d].blocks
    weight = (1.0 - busy) * (1.0 - 0.5 * used)
    return (prefill_s + decode_s) / max(weight, 0.1)


@jit
def load(f, p, s, r, d, stage):  # type: ignore[no-untyped-def]
    """How unwelcome ``r`` is on ``d`` by the policy; the least one takes it."""
    if p.routing == PERCEPTION:
        return expected_s(f, p, s, r, d, stage)
    if stage == ENCODE:
        if p.routing == JSQ_TOKENS:
            return s.device[d].encode_waiting_s
        if p.routing == JSQ_REQUESTS:
            return float(s.queue[2 * d].encode_count + s.queue[2 * d + 1].encode_count)
        return float(s.device[d].encode_outstanding)
    if p.routing == JSQ_REQUESTS:
        return float(s.queue[2 * d].queue_count + s.queue[2 * d + 1].queue_count)
    if p.routing == JSQ_TOKENS:
        return float(s.device[d].waiting_tokens)
    return float(s.device[d].outstanding)


@jit
def fits(f, s, r, d, stage):  # type: ignore[no-untyped-def]
    """Whether ``d`` does this stage, and could ever hold the whole request."""
    if not f.device[d].role & stage:
        return False
    if stage == ENCODE:
        return True
    whole = s.job[r].text + s.job[r].vision + s.job[r].output
    return (whole + BLOCK_TOKENS - 1) // BLOCK_TOKENS <= f.device[d].blocks


@jit
def choose(f, p, s, r, stage, now):  # type: ignore[no-untyped-def]
    """The device for a stage of ``r``, or -1 when none could ever take it."""
    count = 0
    for d in range(len(f.device)):
        if fits(f, s, r, d, stage):
            count += 1
    if count == 0:
        return -1
    first, other = -1, -1
    if p.routing == RANDOM or p.routing == POWER_OF_TWO:
        first = int(chance(s) * count)
        other = int(chance(s) * count) if p.routing == POWER_OF_TWO else first
    elif p.routing == ROUND_ROBIN:
        at = ROUND_ENCODE if stage == ENCODE else ROUND
        first = s.counters[at] % count
        s.counters[at] += 1
        other = first
    best, best_load = -1, NEVER
    second, second_load = -1, NEVER
    i = 0
    for d in range(len(f.device)):
        if not fits(f, s, r, d, stage):
            continue
        if first < 0 or i in (first, other):
            found = load(f, p, s, r, d, stage)
            if found < best_load:
                second, second_load = best, best_load
                best, best_load = d, found
            elif found < second_load:
                second, second_load = d, found
        i += 1
    if stage != ENCODE and p.receipts:
        s.job[r].cost_s = best_load
        s.job[r].second = second
        s.job[r].second_s = second_load
    return best


@jit
def decodable(f, s, r):  # type: ignore[no-untyped-def]
    """Whether some device that decodes could hold all of ``r``."""
    for d in range(len(f.device)):  # noqa: SIM110 - numba compiles loops, not generators
        if fits(f, s, r, d, DECODE):
            return True
    return False


@jit
def route(f, p, s, r, now):  # type: ignore[no-untyped-def]
    """Place a request that arrives; returns the device to wake, or -1 for one refused."""
    to = choose(f, p, s, r, PREFILL, now)
    if to < 0 or not (f.device[to].role & DECODE or decodable(f, s, r)):
        s.counters[REFUSED] += 1
        return -1
    s.job[r].device = to
    s.device[to].outstanding += 1
    s.device[to].waiting_tokens += s.job[r].text + s.job[r].vision
    s.job[r].images_left = s.job[r].images
    if s.job[r].images > 0 and (p.by_modality or not f.device[to].role & ENCODE):
        at = choose(f, p, s, r, ENCODE, now)
        if at < 0:
            s.counters[REFUSED] += 1
            s.device[to].outstanding -= 1
            s.device[to].waiting_tokens -= s.job[r].text + s.job[r].vision
            s.job[r].device = -1
            return -1
        s.job[r].encoder = at
        s.device[at].encode_outstanding += 1
        s.device[at].encode_waiting_s += s.job[r].images * encoding(
            f, f.device[at].model, 1, s.job[r].patches
        )
        s.job[r].seen_next = s.device[at].seen_head
        s.device[at].seen_head = r
        line_up_encode(s, at, 1 if p.by_modality and s.job[r].images > p.few_images else 0, r)
        return at
    if s.job[r].images > 0:
        s.job[r].encoder = to
    arrive(p, s, to, r, queue_class(p, s, r))
    return to


@jit
def run(q, f, p, s, ring):  # type: ignore[no-untyped-def]
    """Simulate ``q``; results stand in ``s``. Returns the time of the last event, or -1 when no
    record is free for the next request: to be called again with more of them.
    """
    count, devices = len(q.arrival_s), len(f.device)
    i = s.counters[NEXT]
    now = 0.0
    while True:
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
                return -1.0
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
