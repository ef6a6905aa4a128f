"""Which device takes a stage of a request, by each policy."""

from __future__ import annotations

from mmctl.engine.schedule.layout import (
    BLOCK_TOKENS,
    DECODE,
    ENCODE,
    JSQ_REQUESTS,
    JSQ_TOKENS,
    PERCEPTION,
    POWER_OF_TWO,
    PREFILL,
    RANDOM,
    REFUSED,
    ROUND,
    ROUND_ENCODE,
    ROUND_ROBIN,
    SEED,
)

from . import jit
from .cache import keep_images, known_images, known_prefix
from .heap import push
from .lists import arrive, line_up_encode, queue_class
from .table import attention, encoding

NEVER = 1e300


@jit
def chance(s):  # type: ignore[no-untyped-def]
    """A number in [0, 1) from a 31-bit linear congruence: the same in Python and compiled."""
    state = (s.counters[SEED] * 1103515245 + 12345) & 0x7FFFFFFF
    s.counters[SEED] = state
    return (state >> 8) / 8388608.0


@jit
def expected_s(f, p, s, r, d, stage):  # type: ignore[no-untyped-def]
    """Seconds that ``r`` would spend on ``d``, from what stands there now.

    Divided by the perception weight of SPEC B2, (1 - compute use) (1 - bandwidth use), which
    breaks ties between devices that are equally near; floored, since it is 0 when all are busy.
    """
    model = f.device[d].model
    if stage == ENCODE:
        new = s.job[r].images - known_images(f, s, d, r)
        own = new * encoding(f, model, 1, s.job[r].patches)
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
    own = 0
    if stage == PREFILL:
        own = whole - known_prefix(f, s, d, r) if f.device[d].prefix else whole
    prefill_s = (s.device[d].waiting_tokens + own) * token_s
    batch = min(s.device[d].outstanding + 1, f.device[d].sequences)
    step_s = (
        f.dense_s[model * f.dense_width + min(batch, f.dense_width - 1)]
        + attention(f, model, 0, 0.0, batch, whole)
        + f.device[d].host_s
    )
    decode_s = p.decode_ratio * p.output_mean * step_s if f.device[d].role & DECODE else 0.0
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
def encoded(f, p, s, d, r, now):  # type: ignore[no-untyped-def]
    """All images of ``r`` are encoded: on to the device that prefills it, over the link."""
    s.job[r].encoded_s = now
    s.device[d].encode_outstanding -= 1
    new = s.job[r].images - s.job[r].reused_images
    s.device[d].encode_waiting_s -= new * encoding(f, f.device[d].model, 1, s.job[r].patches)
    to = s.job[r].device
    if to == d:
        arrive(p, s, d, r, queue_class(p, s, r))
        return
    took_s = f.device[d].latency_s + s.job[r].vision * f.device[d].embedding_s
    push(s, now + took_s, len(f.device) + r)


@jit
def look_up_images(f, s, d, r):  # type: ignore[no-untyped-def]
    """Images that ``d`` has encoded before need not be encoded again."""
    if s.job[r].images_named > 0:
        s.job[r].reused_images = known_images(f, s, d, r)
        s.job[r].images_left = s.job[r].images - s.job[r].reused_images
        keep_images(f, s, d, r)


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
    if not f.device[to].prefix:
        s.job[r].prefix_count = 0
    # Beside the decoder images block no text; where nothing waits there is nothing to block.
    quiet = s.device[to].outstanding - s.device[to].decoding <= 1
    inline = not p.by_modality or s.job[r].images <= p.inline_images or quiet
    if s.job[r].images > 0 and not (inline and f.device[to].role & ENCODE):
        at = choose(f, p, s, r, ENCODE, now)
        if at < 0:
            s.counters[REFUSED] += 1
            s.device[to].outstanding -= 1
            s.device[to].waiting_tokens -= s.job[r].text + s.job[r].vision
            s.job[r].device = -1
            return -1
        s.job[r].encoder = at
        look_up_images(f, s, at, r)
        s.device[at].encode_outstanding += 1
        s.device[at].encode_waiting_s += s.job[r].images_left * encoding(
            f, f.device[at].model, 1, s.job[r].patches
        )
        if s.job[r].images_left == 0:
            s.job[r].started_s = now
            encoded(f, p, s, at, r, now)
            return at
        s.job[r].seen_next = s.device[at].seen_head
        s.device[at].seen_head = r
        line_up_encode(s, at, 1 if p.by_modality and s.job[r].images > p.few_images else 0, r)
        return at
    if s.job[r].images > 0:
        s.job[r].encoder = to
        look_up_images(f, s, to, r)
    arrive(p, s, to, r, queue_class(p, s, r))
    return to
