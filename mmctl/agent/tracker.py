"""Every tensor storage of this thread, from allocation to release, on any torch device.

A dispatch mode sees each operator; composite operators are run again under the mode through
their C++ kernel, because they allocate inside. On the operators of ``engine.model`` this sees
over 99 % of the allocated bytes; what it cannot see are other threads and fused kernels.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from mmctl.engine.records import Modality


class Label(NamedTuple):
    """Whose memory it is: a modality, and the request or part of the model that holds it."""

    modality: Modality
    holder: str


class Sink(Protocol):
    """What hears of storages; ``alloc`` may raise torch.OutOfMemoryError to refuse one.

    ``address`` is where the storage lies, 0 on ``meta``.
    """

    def alloc(self, key: int, size_bytes: int, label: Label, address: int) -> None:
        """``size_bytes`` at ``address`` were taken for ``label``; ``key`` is their name."""

    def free(self, key: int) -> None:
        """What ``alloc`` called ``key`` was given back."""


UNLABELLED = Label("other", "")
_label: ContextVar[Label | None] = ContextVar("label", default=UNLABELLED)


@contextmanager
def labelled(modality: Modality, holder: str) -> Iterator[None]:
    """Storages made inside belong to ``modality`` and ``holder``."""
    token = _label.set(Label(modality, holder))
    try:
        yield
    finally:
        _label.reset(token)


@contextmanager
def on_host() -> Iterator[None]:
    """Storages made inside lie in host memory: the pool does not hear of them."""
    token = _label.set(None)
    try:
        yield
    finally:
        _label.reset(token)


class _Known(NamedTuple):
    """A live storage; ``gone`` calls back when it is released."""

    gone: weakref.ref[Any]
    size_bytes: int
    reported: bool


_COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd


class Tracker(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Reports the storages that operators of this thread make to a sink.

    ``device_type`` names the tensors that count; ``meta`` is for planning without storage.
    """

    def __init__(self, sink: Sink, device_type: str = "cpu") -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.sink, self.device_type = sink, device_type
        self._live: dict[int, _Known] = {}
        self._composite: dict[Any, bool] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Without this the first operator imports torch._dynamo: a second and 76 MiB.
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        composite = self._composite.get(func)
        if composite is None:
            composite = torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), _COMPOSITE)
            self._composite[func] = composite
        if composite:
            with self:
                return func._op_dk(_COMPOSITE, *args, **kwargs)
        result = func(*args, **kwargs)
        if isinstance(result, Tensor):
            self.see(result)
        elif isinstance(result, (tuple, list)):
            for item in result:
                if isinstance(item, Tensor):
                    self.see(item)
        return result

    def see(self, tensor: Tensor) -> None:
        """Report the storage of ``tensor`` unless it is known; again when it was resized."""
        if tensor.device.type != self.device_type:
            return
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        known = self._live.get(key)
        if known is not None:
            if known.size_bytes == size:
                return
            self._release(key)
        if size == 0:
            return
        label = _label.get()
        if label is not None:
            address = 0 if self.device_type == "meta" else storage.data_ptr()
            self.sink.alloc(key, size, label, address)
        # One on the host is remembered too: later views of it must not be taken for new.
        gone = weakref.ref(storage, partial(self._gone, key))
        self._live[key] = _Known(gone, size, label is not None)

    def _gone(self, key: int, _: object) -> None:
        self._release(key)

    def _release(self, key: int) -> None:
        known = self._live.pop(key, None)
        if known is not None and known.reported:
            self.sink.free(key)

    @staticmethod
    def references(key: int) -> int:
        """How many tensors share the storage ``key`` now."""
        return int(torch._C._storage_Use_Count(key))
