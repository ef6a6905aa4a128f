"""Seconds out of the cost tables, linear between their cells."""

from __future__ import annotations

import math

from mmctl.engine.schedule.layout import CHUNKS, CONTEXTS, IMAGES, PATCHES, SEQUENCES

from . import jit

N_CHUNKS, N_CONTEXTS, N_SEQUENCES = len(CHUNKS), len(CONTEXTS), len(SEQUENCES)
N_IMAGES, N_PATCHES = len(IMAGES), len(PATCHES)
PER_MODEL = N_CHUNKS * N_CONTEXTS * N_SEQUENCES * N_CONTEXTS


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
