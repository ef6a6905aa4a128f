"""One step of a device: who is preempted, encoded, prefilled and decoded, by vLLM's rules."""

from __future__ import annotations

from mmctl.engine.schedule.layout import BLOCK_TOKENS, DECODE, LOGGED, PREFILL

from . import jit
from .cache import give_back, hold_prefix, reused, shared_blocks
from .lists import drop_due, drop_run, queue_class, set_due
from .table import attention, encoding


@jit
def preempt(f, p, s, d, ring, step):  # type: ignore[no-untyped-def]
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
        give_back(f, s, d, r, (prompt + BLOCK_TOKENS - 1) // BLOCK_TOKENS)
        s.device[d].waiting_tokens += s.job[r].computed
        s.job[r].cached_blocks = s.job[r].computed // BLOCK_TOKENS
    else:
        context = s.job[r].since_context + step - 1 - s.job[r].since
        give_back(f, s, d, r, (context + BLOCK_TOKENS - 1) // BLOCK_TOKENS)
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
    """Images of one step from the encoder's queues: their number, and patches of all.

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
    return count, total


@jit
def hand_over(f, s, ring, d, step):  # type: ignore[no-untyped-def]
    """Who leaves after ``step``, who decodes from the next one on."""
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


@jit
def schedule(f, p, s, ring, d, now):  # type: ignore[no-untyped-def]
    """Put the next step of ``d`` together: its seconds, or 0 when there is nothing to do."""
    step = s.device[d].scheduled + 1
    model = f.device[d].model
    encode_s = 0.0
    images, patches = 0, 0
    if s.queue[2 * d].encode_head >= 0 or s.queue[2 * d + 1].encode_head >= 0:
        images, patches = encode_batch(f, p, s, d, step, now)
        if images > 0:
            encode_s = encoding(f, model, images, patches / images)
    budget = f.device[d].budget
    held_back = False
    if s.device[d].decoding > 0:
        at = d * BLOCK_TOKENS + step % BLOCK_TOKENS
        while s.growth[at] > s.device[d].free:
            preempt(f, p, s, d, ring, step)
            held_back = True
        s.device[d].free -= s.growth[at]
        s.device[d].taken += s.growth[at]
        budget -= s.device[d].decoding
    chunks, work, prompts, of_vision = 0, 0.0, 0, 0
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
            if s.job[r].vision > 0:
                of_vision += chunk
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
            shared = 0
            if s.job[r].prefix_count > 0:
                shared = shared_blocks(f, s, d, r)
            if need - shared > s.device[d].free:
                break
            if s.job[r].images_left > 0:
                if s.job[r].started_s < 0:
                    s.job[r].started_s = now
                each = max(s.job[r].patches, 1)
                room = (p.encode_patches - inline_patches) // each
                if room <= 0:
                    if inline_images > 0:
                        break
                    room = 1
                take = min(s.job[r].images_left, room)
                s.job[r].images_left -= take
                inline_images += take
                inline_patches += take * each
                if s.job[r].images_left > 0:
                    break
                s.job[r].encoded_s = now
            elif s.job[r].images > 0 and s.job[r].encoded_s < 0:
                s.job[r].encoded_s = now  # all of them were known here
            s.queue[at].queue_head = s.job[r].queue_next
            s.queue[at].queue_count -= 1
            if s.job[r].vision == 0:
                s.device[d].waiting_text -= 1
            if s.job[r].started_s < 0:
                s.job[r].started_s = now
            known = reused(f, s, d, r, whole)
            if s.job[r].preempted == 0 and not s.job[r].context_ready:
                s.job[r].reused = known
                s.job[r].prefiller = d
            if s.job[r].prefix_count > 0:
                hold_prefix(f, s, d, r)
            s.device[d].free -= need - shared
            s.device[d].taken += need - max(shared, known // BLOCK_TOKENS)
            s.device[d].running += 1
            tail = s.device[d].run_tail
            s.job[r].run_previous = tail
            s.job[r].run_next = -1
            if tail >= 0:
                s.job[tail].run_next = r
            s.device[d].run_tail = r
            if s.job[r].context_ready:
                s.device[d].waiting_tokens -= whole
                start_decode(s, d, ring, r, step - 1, whole - 1, s.job[r].done)
                join(s, d, r)
                budget -= 1
                continue
            chunk = min(whole - known, budget)
            budget -= chunk
            chunks += chunk
            work += chunk * (known + 0.5 * chunk)
            prompts += 1
            if s.job[r].vision > 0:
                of_vision += chunk
            s.job[r].computed = known + chunk
            s.device[d].waiting_tokens -= known + chunk
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
    if p.log:
        i = s.counters[LOGGED]
        s.counters[LOGGED] = i + 1
        s.device[d].entry = i
        s.log.device[i] = d
        s.log.took_s[i] = encode_s + llm_s + f.device[d].host_s
        s.log.encode_s[i] = encode_s
        s.log.images[i] = images + inline_images
        s.log.patches[i] = patches + inline_patches
        s.log.prompts[i] = prompts
        s.log.chunk_tokens[i] = chunks
        s.log.vision_tokens[i] = of_vision
        s.log.decoding[i] = decoding
        s.log.free[i] = s.device[d].free
    hand_over(f, s, ring, d, step)
    return encode_s + llm_s + f.device[d].host_s
