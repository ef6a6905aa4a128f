"""The memory accesses of a torch workload, operator by operator, without a GPU.

Each operator sweeps the bytes of its inputs (loads) and outputs (stores); views touch nothing.
Addresses are canonical: storages are placed by an allocator of our own in the order in which
they appear, so that the same workload gives the same addresses in every process and on the
``meta`` device, where tensors have no memory at all. What happens inside an operator (tiling,
scratch memory) is not seen.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mmctl.engine.access.accesses import Accesses, make
from mmctl.engine.errors import MissingExtraError, MmctlError, UsageError

_ROUND_BYTES = 512  # the caching allocator's unit
_FIRST_ADDRESS = 1 << 32
# These read no more of their first input than they write; which rows is not known.
_GATHERS = ("aten.embedding.", "aten.index_select", "aten.gather", "aten.index.Tensor")


def load_workload(target: str) -> Callable[[], Any]:
    """The function that ``file.py:function`` names; calling it runs the workload."""
    import importlib.util

    path, _, function = target.rpartition(":")
    if not path or not function:
        raise UsageError(f"'{target}' is not file.py:function")
    if not Path(path).is_file():
        raise MmctlError(f"cannot read {path}: no such file")
    spec = importlib.util.spec_from_file_location("mmctl_workload", path)
    if spec is None or spec.loader is None:
        raise UsageError(f"'{path}' is no Python file")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found = getattr(module, function, None)
    if not callable(found):
        raise UsageError(f"'{path}' has no function '{function}'")
    return found


def trace(workload: Callable[[], Any], name: str) -> Accesses:
    """Run ``workload`` and give the sweeps of its operators.

    Raises MissingExtraError without torch and MmctlError when the workload touches no tensor.
    """
    try:
        import torch
        from torch.utils._python_dispatch import TorchDispatchMode
    except ImportError:
        raise MissingExtraError("tracing a module", "torch") from None

    recorder = _Recorder()

    class Mode(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            result = func(*args, **(kwargs or {}))
            recorder.operator(func, args, kwargs or {}, result)
            return result

    with torch.no_grad(), Mode():  # type: ignore[no-untyped-call]
        workload()
    if not recorder.address:
        raise MmctlError(f"{name} ran no operator on a tensor")
    return make(
        name, recorder.address, recorder.size, recorder.store, cycle=recorder.cycle,
        stream=recorder.stream, streams=tuple(recorder.streams),
    )  # fmt: skip


class _Recorder:
    def __init__(self) -> None:
        self.address: list[int] = []
        self.size: list[int] = []
        self.store: list[bool] = []
        self.cycle: list[int] = []
        self.stream: list[int] = []
        self.streams: dict[str, int] = {}
        self.count = 0
        self.place: dict[int, tuple[Any, int]] = {}
        self.fleeting: list[tuple[Any, int, int, int]] = []
        self.free: dict[int, list[int]] = defaultdict(list)
        self.next = _FIRST_ADDRESS
        self.kinds: dict[Any, tuple[bool, bool]] = {}

    def operator(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        is_view, is_factory = self._kind(func)
        if is_view:
            return
        self._collect()
        loads = _tensors((args, kwargs))
        stores = _tensors(result)
        if not is_factory:
            gathers = any(word in str(func) for word in _GATHERS)
            for index, tensor in enumerate(loads):
                most = _bytes(stores) if gathers and index == 0 else None
                self._sweep(tensor, False, fleeting=False, most=most)
            for tensor in stores:
                self._sweep(tensor, True, fleeting=True)
        else:
            for tensor in stores:
                self._base(tensor.untyped_storage(), fleeting=True)
        self.count += 1

    def _kind(self, func: Any) -> tuple[bool, bool]:
        known = self.kinds.get(func)
        if known is None:
            schema = getattr(func, "_schema", None)
            returns = schema.returns if schema is not None else []
            aliases = [r.alias_info is not None and not r.alias_info.is_write for r in returns]
            name = str(func)
            is_view = bool(returns) and all(aliases)
            known = is_view, ".empty" in name or "new_empty" in name
            self.kinds[func] = known
        return known

    def _sweep(self, tensor: Any, store: bool, *, fleeting: bool, most: int | None = None) -> None:
        itemsize = tensor.element_size()
        storage = tensor.untyped_storage()
        span = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
        size = min(tensor.numel(), span) * itemsize
        if most is not None:
            size = min(size, most)
        if size <= 0:
            return
        base = self._base(storage, fleeting=fleeting)
        self.address.append(base + tensor.storage_offset() * itemsize)
        self.size.append(size)
        self.store.append(store)
        self.cycle.append(self.count)
        device = str(tensor.device)
        self.stream.append(self.streams.setdefault(device, len(self.streams)))

    def _base(self, storage: Any, *, fleeting: bool) -> int:
        """The canonical address of a storage; a new one takes the last freed of its size."""
        from torch.multiprocessing.reductions import StorageWeakRef

        key = storage._cdata
        known = self.place.get(key)
        if known is not None and not known[0].expired():
            return known[1]
        size = max(_ROUND_BYTES, -(-storage.nbytes() // _ROUND_BYTES) * _ROUND_BYTES)
        held = self.free[size]
        if held:
            base = held.pop()
        else:
            base, self.next = self.next, self.next + size
        reference = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
        self.place[key] = reference, base
        if fleeting:
            self.fleeting.append((reference, key, base, size))
        return base

    def _collect(self) -> None:
        """Give the places of storages that are gone back, in the order of their making."""
        kept = []
        for item in self.fleeting:
            reference, key, base, size = item
            if reference.expired():
                self.free[size].append(base)
                if self.place.get(key, (None, None))[0] is reference:
                    del self.place[key]
            else:
                kept.append(item)
        self.fleeting = kept


def _bytes(tensors: list[Any]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _tensors(value: Any) -> list[Any]:
    import torch

    found: list[Any] = []
    todo = [value]
    while todo:
        item = todo.pop()
        if isinstance(item, torch.Tensor):
            found.append(item)
        elif isinstance(item, (list, tuple)):
            todo.extend(reversed(item))
        elif isinstance(item, dict):
            todo.extend(reversed(list(item.values())))
    return found
