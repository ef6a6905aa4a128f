"""What the simulation's loop works on: columns and records, of Python's own or numpy's for numba.

Times are seconds, sizes tokens or blocks of 16 tokens. Columns and records are indexed by
request or by device, the tables of costs by ``model * width + index``.
"""

from __future__ import annotations

from typing import Any, NamedTuple

BLOCK_TOKENS = 16
PREFIX_TOKENS = 512  # of one known piece of content, as traces name them
PREFIX_BLOCKS = PREFIX_TOKENS // BLOCK_TOKENS
ENCODE, PREFILL, DECODE = 1, 2, 4

# Grids of the cost tables: chunk and context in tokens, sequences, images, patches an image.
CHUNKS = (0, *(16 << i for i in range(10)))
CONTEXTS = (0, *(16 << i for i in range(14)))
SEQUENCES = (0, *(1 << i for i in range(11)))
IMAGES = tuple(1 << i for i in range(7))
PATCHES = tuple(16 << i for i in range(13))

ROUTINGS = (
    "random", "round_robin", "least_outstanding", "jsq_requests", "jsq_tokens", "power_of_two",
    "perception",
)  # fmt: skip
RANDOM, ROUND_ROBIN, LEAST, JSQ_REQUESTS, JSQ_TOKENS, POWER_OF_TWO, PERCEPTION = range(7)


class Jobs(NamedTuple):
    """Requests in order of arrival; ``patches`` are those of one image before merging.

    The known content of request ``i``, where a trace names it, stands at ``prefix_at[i]`` to
    ``prefix_at[i + 1]`` of the state's ``prefix_id``, its images likewise.
    """

    arrival_s: Any
    text: Any
    vision: Any
    images: Any
    patches: Any
    output: Any
    prefix_at: Any
    image_at: Any


class Fleet(NamedTuple):
    """The devices (records of LIMITS) and the cost tables that they use by ``model``."""

    device: Any
    dense_s: Any
    head_s: Any
    attention_s: Any
    encode_s: Any
    dense_width: int
    head_width: int


class Rule(NamedTuple):
    """A policy in numbers. ``by_modality``: text before vision, encoding beside, not in line.

    ``encode_patches`` bounds the patches encoded in one step where the device decodes too,
    ``encode_images`` the images of a micro-batch; a vision request older than ``age_s`` goes
    before text. ``few_images`` splits the encoder's queue. Requests of
    up to ``inline_images`` are encoded where they are prefilled, in the same step.
    ``decode_ratio`` is what a second of decoding counts in routing against one before the first
    token. ``output_mean`` is what routing
    expects of a request, whose length it cannot know. ``receipts`` keeps why each request went
    where it went, ``log`` every step of every device.
    """

    routing: int
    by_modality: int
    age_s: float
    encode_patches: int
    encode_images: int
    few_images: int
    inline_images: int
    decode_ratio: float
    output_mean: float
    receipts: int
    log: int
    seed: int


class Result(NamedTuple):
    """What is known of each request in the end, by its place in the trace; -1 where nothing.

    Moments of the simulated clock, devices by number: ``device`` is where a request ended,
    ``prefiller`` where its prompt was computed. ``reused`` are tokens of the prompt that the
    device still held, ``reused_images`` those that were encoded before. The last three are for
    receipts.
    """

    seen_s: Any
    encoded_s: Any
    started_s: Any
    first_s: Any
    finish_s: Any
    encoder: Any
    prefiller: Any
    device: Any
    preempted: Any
    reused: Any
    reused_images: Any
    cost_s: Any
    second: Any
    second_s: Any


class Log(NamedTuple):
    """Every step of every device in the order they were put together, where it is kept.

    ``chunk_tokens`` of ``prompts`` are prefilled, ``vision_tokens`` of them for requests with
    images, ``decoding`` sequences get a token each; ``free`` blocks are left.
    """

    device: Any
    start_s: Any
    took_s: Any
    encode_s: Any
    images: Any
    patches: Any
    prompts: Any
    chunk_tokens: Any
    vision_tokens: Any
    decoding: Any
    free: Any


class State(NamedTuple):
    """Everything that changes while the simulation runs; the result stands in it too.

    ``job``, ``queue`` (two a device) and ``device`` are records of the fields below; a record of
    ``job`` is a request's while it is under way, so that memory does not grow with the trace.
    ``due_head`` is a ring of steps a device, each the head of a list of what it finishes;
    ``growth`` counts the sequences that need a block in a step, by step modulo 16. The heap of
    events is (time, order, what). ``prefix_held`` counts by device and content the requests that
    hold it, ``prefix_reach`` is how many blocks may have been taken until it is lost once nobody
    does; ``image_reach`` is the like for encoded images.
    """

    job: Any
    queue: Any
    device: Any
    due_head: Any
    growth: Any
    heap_s: Any
    heap_order: Any
    heap_what: Any
    counters: Any
    prefix_id: Any
    prefix_held: Any
    prefix_reach: Any
    image_id: Any
    image_reach: Any
    log: Log
    result: Result


# Of ``counters``: sizes and cursors; FREE heads the list of free records of ``job``.
HEAP, ORDER, SEED, ROUND, ROUND_ENCODE, REFUSED, FREE, NEXT, LOGGED = range(9)
COUNTERS = 9

# What the loop returns when it has to be called again: with more records, or a longer log.
MORE_RECORDS, MORE_LOG = -1.0, -2.0

# Fields of the records: name, type of the array, value at the start.
LIMITS = (
    ("role", "i4", 0), ("model", "i4", 0), ("blocks", "i8", 0), ("lag", "i4", 0),
    ("prefix", "i4", 0), ("host_s", "f8", 0.0), ("sequences", "i4", 0), ("budget", "i4", 0),
    ("latency_s", "f8", 0.0), ("kv_s", "f8", 0.0), ("embedding_s", "f8", 0.0),
    ("image_tokens", "i8", 0),
)  # fmt: skip

JOB = (
    # the request itself
    ("id", "i8", -1), ("arrival_s", "f8", 0.0), ("text", "i4", 0), ("vision", "i4", 0),
    ("images", "i4", 0), ("patches", "i4", 0), ("output", "i4", 0),
    # results
    ("seen_s", "f8", -1.0), ("encoded_s", "f8", -1.0), ("started_s", "f8", -1.0),
    ("first_s", "f8", -1.0), ("finish_s", "f8", -1.0), ("cost_s", "f8", -1.0),
    ("second_s", "f8", -1.0), ("encoder", "i2", -1), ("prefiller", "i2", -1),
    ("device", "i2", -1), ("second", "i2", -1), ("preempted", "i2", 0), ("reused", "i4", 0),
    ("reused_images", "i4", 0),
    # progress
    ("images_left", "i4", 0), ("done", "i4", 0), ("computed", "i4", 0), ("context_ready", "i1", 0),
    ("since", "i4", -1), ("since_context", "i4", 0), ("since_done", "i4", 0),
    ("finish_step", "i4", -1), ("cached_from", "i8", 0), ("cached_blocks", "i4", 0),
    ("prefix_at", "i8", 0), ("prefix_count", "i4", 0), ("image_at", "i8", 0),
    ("images_named", "i4", 0),
    # links of the lists it stands in
    ("queue_next", "i4", -1), ("run_next", "i4", -1), ("run_previous", "i4", -1),
    ("due_next", "i4", -1), ("due_previous", "i4", -1), ("step_next", "i4", -1),
    ("seen_next", "i4", -1),
)  # fmt: skip

QUEUE = (
    ("queue_head", "i4", -1), ("queue_tail", "i4", -1), ("queue_count", "i4", 0),
    ("encode_head", "i4", -1), ("encode_tail", "i4", -1), ("encode_count", "i4", 0),
    ("partial", "i4", -1), ("first_head", "i4", -1), ("encoded_head", "i4", -1),
)  # fmt: skip

DEVICE = (
    ("run_tail", "i4", -1), ("seen_head", "i4", -1), ("free", "i8", 0),
    ("taken", "i8", 0), ("running", "i8", 0), ("decoding", "i8", 0), ("context", "i8", 0),
    ("scheduled", "i8", 0), ("executed", "i8", 0), ("executing", "i4", 0), ("planned_s", "f8", 0.0),
    ("outstanding", "i8", 0), ("waiting_tokens", "i8", 0), ("waiting_text", "i8", 0),
    ("encode_outstanding", "i8", 0), ("encode_waiting_s", "f8", 0.0),
    ("encode_busy_s", "f8", 0.0), ("prefill_busy_s", "f8", 0.0), ("decode_busy_s", "f8", 0.0),
    ("blocking_s", "f8", 0.0), ("steps", "i8", 0), ("entry", "i8", -1), ("embedded", "i8", 0),
)  # fmt: skip
