"""PyTorch profiler traces (and their kin of other vendors) as a Timeline.

Which events are device work is told by their category, or, where a vendor writes none, by the
name of the process they stand in. A kernel belongs to the moment of the call that launched it.
"""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np

from mmctl.engine.access import timeline as tl
from mmctl.engine.access.trace_events import Complete, Metadata, read
from mmctl.engine.errors import MmctlError
from mmctl.engine.modality import Matcher
from mmctl.engine.profiles import ModalityPatterns

# Categories in lower case. An unknown category with a stream among its arguments is device work.
DEVICE_CATEGORIES = {
    "kernel", "concurrent_kernel", "gpu_memcpy", "gpu_memset", "memcpy", "memset",
    "mtia_ccp_events", "xpu_kernel", "privateuse1_kernel", "npu_kernel",
}  # fmt: skip
COPY_CATEGORIES = {"gpu_memcpy", "gpu_memset", "memcpy", "memset"}
LAUNCH_CATEGORIES = {
    "cuda_runtime", "cuda_driver", "runtime", "driver", "hip_runtime", "mtia_runtime",
    "xpu_runtime", "xpu_driver", "glow_runtime", "privateuse1_runtime", "privateuse1_driver",
}  # fmt: skip
HOST_CATEGORIES = {
    "cpu_op", "operator", "user_annotation", "python_function", "trace", "overhead",
    "gpu_user_annotation", "cuda_sync", "ac2g", "cpu_instant_event", "mtia_insight",
    "cuda_event", "async_npu", "collective_comm",
}  # fmt: skip
DEVICE_PROCESSES = re.compile(r"^(Ascend Hardware|NPU|GPU \d|.*XPU \d)", re.IGNORECASE)
COLLECTIVE_PROCESSES = re.compile(r"^(HCCL|Communication)", re.IGNORECASE)

STEP = "ProfilerStep"
CPU_COLLECTIVE = re.compile(r"^(gloo|mpi|nccl|rccl|hccl|xccl|ucc):\w+")
WAIT_CALLS = re.compile(
    r"(Device|Stream|Event|Context|Ctx)Synchronize|^(cuda|hip|cu|aclrt)(Free|Malloc|Memcpy|Memset)"
    r"(?!.*Async)|^aclrtSynchronize|runtimeSync"
)


def timeline(path: Path, rank: int, patterns: ModalityPatterns) -> tl.Timeline:
    """The trace at ``path``; ``rank`` is used where the file names none.

    Work launched in the last profiler step is left out when there are two steps or more, and so
    is work whose launch was not recorded: both are what HTA 0.5.0 does.
    Raises MmctlError for a file that is no trace.
    """
    collect = _Collect(patterns)
    beside = read(path, collect.take)
    if collect.events == 0:
        raise MmctlError(f"{path} holds no events")
    return collect.result(str(path), _rank(path, beside, rank), beside)


def _rank(path: Path, beside: dict[str, Any], fallback: int) -> int:
    for value in (beside.get("distributedInfo"), beside):
        rank = value.get("rank") if isinstance(value, dict) else None
        if isinstance(rank, int):
            return rank
    found = re.search(r"(?:rank|worker)[-_ ]?(\d+)", path.name)
    return int(found[1]) if found else fallback


class _Collect:
    """Columns that grow piece by piece."""

    def __init__(self, patterns: ModalityPatterns) -> None:
        self.matcher = Matcher(patterns)
        self.events = 0
        self.name_ids: dict[str, int] = {}
        self.modality_of_name: dict[str, int] = {}
        self.wait_of_name: dict[str, bool] = {}
        self.collective_of_name: dict[str, bool] = {}
        self.stream_ids: dict[tuple[str, str], int] = {}
        self.lanes: dict[tuple[Any, ...], int] = {}
        self.device: list[tuple[Any, ...]] = []
        self.launches: list[tuple[Any, ...]] = []
        self.named: dict[Any, list[tuple[float, float, int]]] = defaultdict(list)
        self.steps: list[tuple[float, float, str, bool]] = []
        self.calls: list[Complete] = []
        self.grouped: list[Complete] = []
        self.waits: dict[str, tuple[int, float]] = {}
        self.processes: dict[Any, str] = {}
        self.unlabelled: list[Complete] = []

    def take(self, events: list[Any]) -> None:
        self.events += len(events)
        by_category: dict[str, list[Any]] = defaultdict(list)
        for event in events:
            by_category[event.cat].append(event)
        for event in by_category.pop("\0metadata", ()):
            self._metadata(event)
        by_category.pop("\0ignored", None)
        for category, items in by_category.items():
            self._category(category.lower(), items)

    def _metadata(self, event: Metadata) -> None:
        if event.args is None:
            return
        if event.name == "process_name" and isinstance(event.args.name, str):
            self.processes.setdefault(event.pid, event.args.name)
        elif event.name == "process_labels" and isinstance(event.args.labels, str):
            label = event.args.labels
            if DEVICE_PROCESSES.match(label):
                self.processes[event.pid] = label

    def _category(self, category: str, items: list[Any]) -> None:
        if category in DEVICE_CATEGORIES:
            self._device(category, items)
        elif category in LAUNCH_CATEGORIES:
            self._launches(items)
        elif category in HOST_CATEGORIES:
            self._host(category, items)
        else:
            with_stream = [e for e in items if e.args is not None and e.args.stream is not None]
            if category and with_stream:
                self._device(category, with_stream)
            else:
                self.unlabelled.extend(items)

    def _device(self, category: str, items: list[Complete]) -> None:
        names, lanes = self.name_ids, self.lanes
        index = [names.setdefault(e.name, len(names)) for e in items]
        keys = [_lane_key(e) for e in items]
        for key in set(keys):
            if key not in lanes:
                lanes[key] = self.stream_ids.setdefault(_lane(key), len(self.stream_ids))
        self.grouped += [
            e for e in items
            if e.args is not None and (e.args.collective or e.args.group is not None)
        ]  # fmt: skip
        self.device.append(
            (
                np.array([e.ts for e in items]),
                np.array([e.dur for e in items]),
                np.array(index, np.int64),
                np.array([lanes[key] for key in keys], np.int64),
                np.array([_correlation(e.args) for e in items], np.int64),
                np.full(len(items), category in COPY_CATEGORIES),
            )
        )

    def _launches(self, items: list[Complete]) -> None:
        waits = self.wait_of_name
        with_args = [e for e in items if e.args is not None and e.args.correlation is not None]
        if with_args:
            thread = [hash((e.pid, e.tid)) for e in with_args]
            self.launches.append(
                (
                    np.array([_whole(e.args.correlation) for e in with_args]),  # type: ignore[union-attr]
                    np.array([e.ts for e in with_args]),
                    np.array(thread, np.int64),
                )
            )
        for event in items:
            name = event.name
            wait = waits.get(name)
            if wait is None:
                wait = waits[name] = WAIT_CALLS.search(name) is not None
            if wait:
                count, blocked = self.waits.get(name, (0, 0.0))
                self.waits[name] = count + 1, blocked + event.dur

    def _host(self, category: str, items: list[Complete]) -> None:
        known, collective = self.modality_of_name, self.collective_of_name
        for event in items:
            name = event.name
            modality = known.get(name)
            if modality is None:
                modality = known[name] = tl.MODALITIES.index(self.matcher.modality(name))
                collective[name] = CPU_COLLECTIVE.match(name) is not None
            if modality:
                key = (event.pid, event.tid)
                self.named[key].append((event.ts, event.ts + event.dur, modality))
            if collective[name] and category != "gpu_user_annotation":
                self.calls.append(event)
            if STEP in name:
                on_device = category == "gpu_user_annotation"
                self.steps.append((event.ts, event.ts + event.dur, name, on_device))
            elif category == "user_annotation" and name.startswith("step#"):
                self.steps.append((event.ts, event.ts + event.dur, name, False))

    def _place_unlabelled(self) -> None:
        """Events without a known category, by the process they stand in."""
        device, host = [], []
        communicators = False
        for event in self.unlabelled:
            process = self.processes.get(event.pid, "")
            if DEVICE_PROCESSES.match(process):
                device.append(event)
            elif COLLECTIVE_PROCESSES.match(process):
                if tl.kind_of(event.name) == tl.COLLECTIVE:
                    device.append(event)
                    communicators = True
            elif not process.startswith("Overlap Analysis"):
                host.append(event)
        self.unlabelled = []
        if communicators:  # the tasks of a collective lie on its streams too: count it once
            device = [e for e in device if tl.kind_of(e.name) != tl.OTHER]
        if device:
            self._device("", device)
        self._host("", host)

    def result(self, file: str, rank: int, beside: dict[str, Any]) -> tl.Timeline:
        self._place_unlabelled()
        base = beside.get("baseTimeNanoseconds")
        base_ns = base if isinstance(base, int) else 0
        device: list[Any] = [np.concatenate(c) for c in zip(*self.device, strict=True)] or [
            np.empty(0), np.empty(0), *(np.empty(0, np.int64) for _ in range(3)),
            np.empty(0, np.bool_),
        ]  # fmt: skip
        ts, dur, name, stream, correlation, copies = device
        launch, thread = self._join(correlation)
        keep, dropped_step, dropped_launch = self._kept(ts, launch)
        ts, dur, name, stream, copies = (c[keep] for c in (ts, dur, name, stream, copies))
        launch, thread = launch[keep], thread[keep]
        names = list(self.name_ids)
        kind = np.array([tl.kind_of(n) for n in names], np.int64)[name] if names else name
        kind = np.where(copies, tl.COPY, kind)
        start = tl.to_ns(ts, base_ns)
        rows = {
            "start_ns": start,
            "end_ns": start + np.rint(dur * 1000).astype(np.int64),
            "name": name,
            "kind": kind,
            "stream": stream,
            "modality": self._modalities(ts, launch, thread, stream),
            "launch_ns": np.where(np.isnan(launch), -1, tl.to_ns(np.nan_to_num(launch), base_ns)),
            "names": names,
            "streams": list(self.stream_ids),
        }
        distributed = beside.get("distributedInfo")
        world = distributed.get("world_size") if isinstance(distributed, dict) else None
        return tl.build(
            file, rank, rows,
            calls=self._calls(base_ns, ts, dur, name, names, stream),
            waits={n: (c, round(b * 1000)) for n, (c, b) in self.waits.items()},
            steps=[
                (_ns(a, base_ns), _ns(b, base_ns), n)
                for a, b, n, on_device in sorted(self.steps)
                if not on_device
            ],
            world_size=world if isinstance(world, int) else None,
            dropped_last_step=dropped_step,
            dropped_no_launch=dropped_launch,
            fractional_us=bool(len(ts)) and bool((ts % 1).any() or (dur % 1).any()),
        )  # fmt: skip

    def _join(self, correlation: tl.Int) -> tuple[tl.Float, tl.Int]:
        """Launch time (µs, NaN where unknown) and thread of each piece of device work."""
        launch = np.full(len(correlation), np.nan)
        thread = np.zeros(len(correlation), np.int64)
        if self.launches:
            ids, at, threads = (np.concatenate(c) for c in zip(*self.launches, strict=True))
            order = np.argsort(ids, kind="stable")
            ids, at, threads = ids[order], at[order], threads[order]
            place = np.minimum(np.searchsorted(ids, correlation), len(ids) - 1)
            found = (ids[place] == correlation) & (correlation >= 0)
            launch[found], thread[found] = at[place[found]], threads[place[found]]
        return launch, thread

    def _kept(self, ts: tl.Float, launch: tl.Float) -> tuple[tl.Flag, int, int]:
        steps = {name for _, _, name, _ in self.steps if STEP in name}
        keep = np.ones(len(ts), np.bool_)
        if len(steps) < 2 or len(ts) == 0:
            return keep, 0, 0
        # HTA takes the last begin of a step, the device's own annotation of it included.
        last = max(start for start, _, name, _ in self.steps if STEP in name)
        known = ~np.isnan(launch)
        if not known.any():
            keep = ts < last
            return keep, int((~keep).sum()), 0
        late = known & ~(launch < last)
        return known & ~late, int(late.sum()), int((~known).sum())

    def _modalities(self, ts: tl.Float, launch: tl.Float, thread: tl.Int, stream: tl.Int) -> tl.Int:
        """The innermost named range around each launch, else around the work on its stream."""
        result = np.zeros(len(ts), np.int64)
        for key, ranges in self.named.items():
            edges, values = innermost(ranges)
            here = (thread == hash(key)) & ~np.isnan(launch)
            if here.any():
                place = np.searchsorted(edges, launch[here], side="right")
                result[here] = values[place]
            lane = self.stream_ids.get((_text(key[0]), _text(key[1])))
            if lane is not None:
                here = (stream == lane) & (result == 0)
                result[here] = values[np.searchsorted(edges, ts[here], side="right")]
        return result

    def _calls(
        self, base_ns: int, ts: Any, dur: Any, name: tl.Int, names: list[str], stream: tl.Int
    ) -> list[tl.Call]:
        """Collectives of the host's backend, or the device's kernels where there are any."""
        grouped = {(event.ts, event.name): event for event in self.grouped}
        found = []
        collective = np.array([tl.kind_of(n) == tl.COLLECTIVE for n in names], np.bool_)
        here = np.flatnonzero(collective[name]) if names else np.empty(0, np.int64)
        starts = tl.to_ns(ts[here], base_ns).tolist()
        for start, t, d, i in zip(
            starts, ts[here].tolist(), dur[here].tolist(), name[here].tolist(), strict=True
        ):
            at_work = grouped.get((t, names[i]))
            args = at_work.args if at_work else None
            label = args.collective if args and args.collective else short_name(names[i])
            found.append(
                tl.Call(
                    label, _group(args), start, round(d * 1000),
                    _whole(args.sequence) if args and args.sequence is not None else None,
                    _members(args),
                )
            )  # fmt: skip
        if found:
            return found
        return [
            tl.Call(
                event.name, _group(event.args), _ns(event.ts, base_ns),
                round(event.dur * 1000), None, _members(event.args),
            )
            for event in self.calls
        ]  # fmt: skip


def _ns(us: float, base_ns: int) -> int:
    return int(tl.to_ns(np.array([us]), base_ns)[0])


def _lane_key(event: Complete) -> tuple[Any, ...]:
    """What tells lanes apart, as written: device and stream, or process and thread."""
    args = event.args
    if args is None:
        return event.pid, event.tid
    if args.stream is not None and args.device is not None:
        return args.device, args.stream
    device = args.device if args.device is not None else args.device_id
    stream = args.stream if args.stream is not None else args.stream_id
    return event.pid if device is None else device, event.tid if stream is None else stream


def _lane(key: tuple[Any, ...]) -> tuple[str, str]:
    return _text(key[0]), _text(key[1])


def _correlation(args: Any) -> int:
    if args is None:
        return -1
    number = args.correlation
    if number.__class__ is int:
        return number
    return _whole(number if number is not None else args.correlation_id)


def _text(value: Any) -> str:
    text = str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)
    return text.removeprefix("stream ").strip()


def _whole(value: Any) -> int:
    try:
        return int(value)
    except (TypeError, ValueError, OverflowError):
        return -1


def short_name(name: str) -> str:
    """A kernel's name without its arguments."""
    return re.split(r"[(<]", name, maxsplit=1)[0].strip() or name


def _group(args: Any) -> str:
    if args is None or args.group is None:
        return "default"
    return str(args.group)


def _members(args: Any) -> tuple[int, ...]:
    ranks = args.group_ranks if args is not None else None
    if isinstance(ranks, str):
        if "..." in ranks:  # the profiler shortens long lists
            return ()
        return tuple(int(number) for number in re.findall(r"\d+", ranks))
    if isinstance(ranks, list):
        return tuple(rank for rank in ranks if isinstance(rank, int))
    return ()


def innermost(ranges: list[tuple[float, float, int]]) -> tuple[Any, tl.Int]:
    """Edges in time and, before, between and after them, the modality of the innermost range."""
    edges: list[float] = []
    values: list[int] = [0]
    open_: list[tuple[float, int]] = []

    def close(until: float) -> None:
        while open_ and open_[-1][0] <= until:
            end, _ = open_.pop()
            edges.append(max(end, edges[-1]))
            values.append(open_[-1][1] if open_ else 0)

    for start, end, modality in sorted(ranges, key=lambda r: (r[0], -r[1])):
        close(start)
        edges.append(start)
        values.append(modality)
        open_.append((end, modality))
    close(float("inf"))
    return np.array(edges), np.array(values, np.int64)
