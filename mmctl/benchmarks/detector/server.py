"""A server of the detector: ``python -m mmctl.benchmarks.detector.server MODEL naive FD…``.

A client is a connected socket: it sends a window (float32, as the model's input without its
batch) and gets the probabilities back. ``naive`` makes one call per request. ``batched`` takes
what waits on all sockets, at most 32, straight into rows that a binding of each batch size was
bound to once, and makes one call. Ends when the last client has gone, and then says how many
requests it answered in how many calls.
"""

from __future__ import annotations

import select
import socket
import sys
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import onnxruntime

from mmctl.engine.errors import quiet_interrupt

MAX_BATCH = 32
SIZES = (1, 2, 4, 8, 16, MAX_BATCH)
"""Batches with a binding of their own: a batch takes the smallest that holds it."""


class Served(NamedTuple):
    """Requests answered, and the calls of the model that it took."""

    requests: int
    calls: int


def main() -> None:
    """Serve the sockets whose numbers are the arguments."""
    model, mode, *numbers = sys.argv[1:]
    clients = {int(number): socket.socket(fileno=int(number)) for number in numbers}
    served = (batched if mode == "batched" else naive)(model, clients)
    print(*served, flush=True)


def session(model: str, batch: int) -> onnxruntime.InferenceSession:
    """The model with its batch fixed, on one thread."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = 3
    options.add_free_dimension_override_by_name("batch", batch)
    return onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])


def _ready(clients: dict[int, socket.socket]) -> Iterator[list[socket.socket]]:
    """The sockets on which a request waits, whenever there are any; those closed are left out."""
    poll = select.poll()
    for number in clients:
        poll.register(number, select.POLLIN)
    while clients:
        ready = []
        for number, _ in poll.poll():
            client = clients[number]
            if client.recv(1, socket.MSG_PEEK):
                ready.append(client)
            else:
                poll.unregister(number)
                clients.pop(number).close()
        if ready:
            yield ready


def naive(model: str, clients: dict[int, socket.socket]) -> Served:
    """One call of the model per request, with arrays of its own."""
    one = session(model, 1)
    given = one.get_inputs()[0]
    shape = (1, *given.shape[1:])
    size = 4 * int(np.prod(shape))
    requests = 0
    for ready in _ready(clients):
        for client in ready:
            data = client.recv(size, socket.MSG_WAITALL)
            window = np.frombuffer(data, np.float32).reshape(shape)
            client.sendall(one.run(None, {given.name: window})[0].tobytes())
            requests += 1
    return Served(requests, requests)


def batched(model: str, clients: dict[int, socket.socket]) -> Served:
    """One call for all that waits, on memory that was bound before the first request."""
    sessions = {size: session(model, size) for size in SIZES}
    given, made = sessions[1].get_inputs()[0], sessions[1].get_outputs()[0]
    windows = np.zeros((MAX_BATCH, *given.shape[1:]), np.float32)
    answers = np.zeros((MAX_BATCH, made.shape[1]), np.float32)
    bindings = {}
    for size, one in sessions.items():
        binding = one.io_binding()
        for bind, value, array in (
            (binding.bind_input, given.name, windows), (binding.bind_output, made.name, answers),
        ):  # fmt: skip
            bind(value, "cpu", 0, np.float32, [size, *array.shape[1:]], array.ctypes.data)
        bindings[size] = binding
    rows, replies = (
        [memoryview(row.view(np.uint8).data) for row in array.reshape(MAX_BATCH, -1)]
        for array in (windows, answers)
    )
    requests = calls = 0
    for ready in _ready(clients):
        for start in range(0, len(ready), MAX_BATCH):
            batch = ready[start : start + MAX_BATCH]
            for row, client in zip(rows, batch, strict=False):
                client.recv_into(row, 0, socket.MSG_WAITALL)
            size = next(size for size in SIZES if size >= len(batch))
            sessions[size].run_with_iobinding(bindings[size])
            for reply, client in zip(replies, batch, strict=False):
                client.sendall(reply)
            requests += len(batch)
            calls += 1
    return Served(requests, calls)


if __name__ == "__main__":
    with quiet_interrupt():
        main()
