"""The simulation's loop: continuous batching on each device, one event a step.

A step of a device encodes images, prefills chunks and decodes one token of every running
sequence, by the rules of vLLM's scheduler: running first, then waiting in order; a prompt is
admitted when all its blocks fit; the youngest running one is preempted and computed again when
no block is left. ``lag`` 1 is asynchronous scheduling: a step is put together while the one
before still runs. A step costs O(1), not O(batch): sums over the running sequences are kept,
and a sequence stands in the list of the step that will finish it.

The same source runs as Python on lists and, through ``compiled``, as machine code on arrays;
both do the same arithmetic in the same order. ``compiled`` loads this package a second time
with another ``jit``: that is why the modules in it import each other by relative names.
"""

from __future__ import annotations

from typing import Any

jit: Any = globals().get("jit", lambda function: function)
