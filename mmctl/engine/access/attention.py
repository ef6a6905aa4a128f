"""Memory accesses of the heads of a torch attention module, by a model of how they run.

The calls of ``scaled_dot_product_attention`` and the layout of their tensors are seen as they
happen; when each line is asked for is modelled: all heads of a layer run at once, in tiles of
64 queries that read the keys and values again, each head asks for a line every ``GAP_CYCLES``
with a phase of its own, and the next layer starts while the outputs of this one are written.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from mmctl.engine.access.accesses import LINE_BYTES, Accesses, Int, make
from mmctl.engine.errors import MissingExtraError, MmctlError

TILE_QUERIES = 64
GAP_CYCLES = 24
_MOST_ACCESSES = 4_000_000


def trace(workload: Callable[[], Any], name: str) -> Accesses:
    """Run ``workload`` and give the accesses of its attention heads, with head and layer.

    Raises MissingExtraError without torch and MmctlError when no attention ran.
    """
    try:
        import torch
    except ImportError:
        raise MissingExtraError("tracing a module", "torch") from None

    parts: list[dict[str, Int]] = []
    rng = np.random.default_rng(0)
    functional = torch.nn.functional
    attention = functional.scaled_dot_product_attention
    start = 0

    def seen(query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal start
        result = attention(query, key, value, *args, **kwargs)
        part = _layer([query, key, value, result], len(parts), start, rng)
        start = int(part.pop("loads_end")[0])
        parts.append(part)
        if sum(len(p["address"]) for p in parts) > _MOST_ACCESSES:
            raise MmctlError(f"{name} makes too many accesses: try a shorter sequence")
        return result

    # Every caller, torch's own multi-head attention included, looks the function up there; a
    # function mode would not see calls from inside other functions.
    functional.scaled_dot_product_attention = seen
    try:
        with torch.no_grad():
            workload()
    finally:
        functional.scaled_dot_product_attention = attention
    if not parts:
        raise MmctlError(f"{name} ran no scaled_dot_product_attention")
    columns = {key: np.concatenate([part[key] for part in parts]) for key in parts[0]}
    order = np.argsort(columns["cycle"], kind="stable")
    columns = {key: values[order] for key, values in columns.items()}
    return make(
        name, columns["address"], np.full(len(order), LINE_BYTES), columns["store"] > 0,
        cycle=columns["cycle"], head=columns["head"], layer=columns["layer"],
    )  # fmt: skip


def _layer(tensors: list[Any], layer: int, start: int, rng: np.random.Generator) -> dict[str, Int]:
    query, key, value, out = tensors
    heads = query.shape[-3]
    tiles = -(-query.shape[-2] // TILE_QUERIES)
    address, cycle, head, store = [], [], [], []
    loads_end = start
    for h in range(heads):
        mine = h * key.shape[-3] // heads  # grouped queries share keys and values
        loads = np.concatenate([_rows(query, h), *([_rows(key, mine), _rows(value, mine)] * tiles)])
        stores = _rows(out, h)
        lines = np.concatenate([loads, stores])
        jitter = rng.integers(0, GAP_CYCLES // 4, len(lines))
        at = start + int(rng.integers(GAP_CYCLES)) + np.arange(len(lines)) * GAP_CYCLES + jitter
        loads_end = max(loads_end, int(at[len(loads) - 1]))
        address.append(lines)
        cycle.append(at)
        head.append(np.full(len(lines), h))
        store.append(np.repeat([0, 1], [len(loads), len(stores)]))
    count = sum(len(part) for part in address)
    return {
        "address": np.concatenate(address), "cycle": np.concatenate(cycle),
        "head": np.concatenate(head), "layer": np.full(count, layer),
        "store": np.concatenate(store), "loads_end": np.array([loads_end]),
    }  # fmt: skip


def _rows(tensor: Any, head: int) -> Int:
    """The lines of one head's rows, in order (of the first batch entry)."""
    while tensor.dim() > 3:
        tensor = tensor[0]
    rows = tensor[head]
    first = rows.data_ptr() + np.arange(rows.shape[0]) * rows.stride(0) * rows.element_size()
    width = rows.shape[1] * rows.element_size()
    per_row = -(-width // LINE_BYTES)
    lines: Int = (first[:, None] + np.arange(per_row) * LINE_BYTES).reshape(-1)
    return lines // LINE_BYTES * LINE_BYTES
