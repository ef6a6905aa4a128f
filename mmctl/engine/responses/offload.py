"""KV cache to host memory and back, asynchronously, block by block.

On a GPU the copies run on a stream of their own into pinned blocks; elsewhere a helper thread
copies. The caller's thread drops the device copy, when it calls ``finish``: where memory is
given back stays deterministic.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from mmctl.engine.errors import MmctlError
from mmctl.engine.responses.estimate import CHUNK_BYTES, Estimate, bytes_of, spans
from mmctl.engine.units import show_bytes

if TYPE_CHECKING:
    import torch

BLOCK_BYTES = 16 * 2**20


class HostMemoryError(MmctlError):
    """The host has no memory to spare for an offload."""


def host_free_bytes() -> int:
    """Host memory that can be taken without swapping (MemAvailable)."""
    import psutil

    return int(psutil.virtual_memory().available)


def estimate_offload(tensors: Sequence[torch.Tensor]) -> Estimate:
    """What moving ``tensors`` to the host frees: all of it, and nothing is lost."""
    size = bytes_of(*tensors)
    return Estimate(
        response="offload_kv", before_bytes=size, frees_bytes=size, scratch_bytes=0,
        host_bytes=size, lossy=False,
    )  # fmt: skip


class HostBlocks:
    """Host blocks of one size, pinned where there is a GPU, kept for the next offload.

    Pinning costs more than copying: ``reserve`` some before they are needed.
    """

    def __init__(self, block_bytes: int = BLOCK_BYTES, reserve_bytes: int = 2**30) -> None:
        import torch

        self.block_bytes = block_bytes
        self.reserve_bytes = reserve_bytes
        self._pinned = torch.cuda.is_available()
        self._free: list[torch.Tensor] = []
        self._lock = threading.Lock()

    @property
    def free_bytes(self) -> int:
        """Bytes of blocks that wait for the next offload."""
        return len(self._free) * self.block_bytes

    def reserve(self, size_bytes: int) -> None:
        """Have blocks ready for ``size_bytes``; HostMemoryError when the host cannot spare them."""
        blocks = self.take(size_bytes)
        self.give(blocks)

    def take(self, size_bytes: int) -> list[torch.Tensor]:
        """Blocks for ``size_bytes``; HostMemoryError when that would eat the host's reserve."""
        import torch

        count = -(-size_bytes // self.block_bytes)
        with self._lock:
            ready, self._free = self._free[:count], self._free[count:]
        missing = (count - len(ready)) * self.block_bytes
        available = host_free_bytes() if missing else 0
        if missing and available - missing < self.reserve_bytes:
            self.give(ready)
            raise HostMemoryError(
                f"an offload of {show_bytes(size_bytes)} needs {show_bytes(missing)} of the host, "
                f"which has {show_bytes(available)} and keeps {show_bytes(self.reserve_bytes)}"
            )
        new = (
            torch.empty(self.block_bytes, dtype=torch.uint8, pin_memory=self._pinned)
            for _ in range(count - len(ready))
        )
        return [*ready, *new]

    def give(self, blocks: list[torch.Tensor]) -> None:
        """Take blocks back for the next offload."""
        with self._lock:
            self._free.extend(blocks)

    def release(self) -> None:
        """Return the waiting blocks to the host."""
        with self._lock:
            self._free.clear()


class Offloaded:
    """A tensor on its way to the host, or there. ``finish`` drops the device copy."""

    def __init__(
        self,
        source: torch.Tensor,
        blocks: list[torch.Tensor],
        pool: HostBlocks,
        done: Future[None] | Any,  # a future, or an event of a GPU
    ) -> None:
        self.shape, self.dtype, self.device = source.shape, source.dtype, source.device
        self.nbytes = bytes_of(source)
        self._source: torch.Tensor | None = source
        self._blocks, self._pool, self._done = blocks, pool, done

    @property
    def ready(self) -> bool:
        """True when the copy has arrived; does not wait."""
        if isinstance(self._done, Future):
            return self._done.done()
        return bool(self._done.query())

    def finish(self) -> int:
        """Wait for the copy, drop this handle's hold on the device copy, say its bytes.

        The memory is free once the caller holds no reference of its own. A second call
        frees nothing and returns 0.
        """
        self._wait()
        freed = self.nbytes if self._source is not None else 0
        self._source = None
        return freed

    def _wait(self) -> None:
        if isinstance(self._done, Future):
            self._done.result()
        else:
            self._done.synchronize()

    def reload(self) -> torch.Tensor:
        """The tensor on its device again, bit for bit; the host blocks go back to their pool.

        On a GPU the copy is ordered before later work of the current stream.
        """
        import torch

        self._wait()
        if self._source is not None:
            back, self._source = self._source, None
        elif not self._blocks and self.nbytes:
            raise MmctlError("this tensor was reloaded or discarded before")
        else:
            back = torch.empty(self.shape, dtype=self.dtype, device=self.device)
            flat = back.view(-1).view(torch.uint8)
            size = self._pool.block_bytes
            for number, block in enumerate(self._blocks):
                part = flat[number * size : (number + 1) * size]
                part.copy_(block[: len(part)], non_blocking=True)
            if self.device.type == "cuda":
                # The blocks may be overwritten by the next offload as soon as they are given.
                torch.cuda.current_stream(self.device).synchronize()
        self.discard()
        return back

    def discard(self) -> None:
        """Forget the tensor: its request is gone."""
        self._wait()
        self._source = None
        blocks, self._blocks = self._blocks, []
        self._pool.give(blocks)


_copier: ThreadPoolExecutor | None = None
_streams: dict[int, Any] = {}


def offload(tensor: torch.Tensor, pool: HostBlocks) -> Offloaded:
    """Start to copy ``tensor`` to host blocks of ``pool`` and return at once.

    The tensor must not be written until ``finish``. Raises HostMemoryError before anything
    is copied when the host has too little memory.
    """
    import torch

    global _copier
    source = tensor.detach()
    blocks = pool.take(bytes_of(source))
    if source.device.type == "cuda":
        cuda: Any = torch.cuda
        index = source.device.index or 0
        if index not in _streams:
            _streams[index] = cuda.Stream(source.device)
        stream = _streams[index]
        stream.wait_stream(cuda.current_stream(source.device))
        with cuda.stream(stream):
            _copy_out(source, blocks, pool.block_bytes)
            event = cuda.Event()
            event.record(stream)
        source.record_stream(stream)
        return Offloaded(source, blocks, pool, event)
    if _copier is None:
        _copier = ThreadPoolExecutor(1, thread_name_prefix="mmctl-offload")
    return Offloaded(
        source, blocks, pool, _copier.submit(_copy_out, source, blocks, pool.block_bytes)
    )


def _copy_out(source: torch.Tensor, blocks: list[torch.Tensor], size: int) -> None:
    import torch

    offset = 0
    # Inference mode belongs to a thread, and blocks made in it may be written nowhere else.
    with torch.inference_mode():
        for piece in _pieces(source):
            at = 0
            while at < len(piece):
                number, inside = divmod(offset, size)
                step = min(len(piece) - at, size - inside)
                target = blocks[number][inside : inside + step]
                target.copy_(piece[at : at + step], non_blocking=True)
                at, offset = at + step, offset + step


def _pieces(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The bytes of ``tensor`` in order; one with gaps is made whole a chunk at a time."""
    import torch

    if tensor.is_contiguous() or bytes_of(tensor) <= CHUNK_BYTES:
        yield tensor.contiguous().view(-1).view(torch.uint8)
    elif tensor.dim() == 1:
        for span in spans(len(tensor), CHUNK_BYTES // tensor.element_size()):
            yield tensor[span].contiguous().view(torch.uint8)
    else:
        for part in tensor.unbind(0):
            yield from _pieces(part)
