"""A URI → an iterator of records; one file per kind of source, named in ``SCHEMES``.

Beside them stands what sources share: readers of what tools print (``smi``, ``smi_text``,
``links``, ``exposition``; ``files`` tells contents apart), which metric is which field
(``engines``, ``device_exporters``), and what is made of all sources: ``doctor``, its ``bundle``,
the ``exporter``.
"""

from __future__ import annotations

import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from mmctl.engine import plugins, streams
from mmctl.engine.errors import NoSourceError, UsageError, nearest
from mmctl.engine.profiles import Profile
from mmctl.engine.records import AnyRecord, Event


class Scheme(NamedTuple):
    """Where a scheme's function is, and how it is driven.

    A *polled* function ``readings(rest, profile)`` yields one reading, a list of records, each
    time it is asked, and cleans up when it is closed. Any other is ``source(rest, profile,
    stop)``: it yields records at its own pace and looks at ``stop`` at least every 200 ms. One
    that is to give a few readings only is waited for ``patience_s`` at most; one that ``returns``
    is waited for after it has gone. ``checks`` are what ``mmctl doctor`` asks of it: functions
    that yield ``check.Check``. A target is ``module:function`` of this folder.
    """

    target: str
    polled: bool
    about: str
    patience_s: float = 5.0
    checks: tuple[str, ...] = ()
    returns: bool = False


SCHEMES: dict[str, Scheme] = {
    "nvml": Scheme(
        "nvml:readings", True, "NVIDIA devices, by the driver's own library",
        checks=("nvml_checks:binding", "nvml_checks:nvidia_driver", "nvml_checks:nvidia_devices"),
    ),
    "agent": Scheme(
        "agent:source", False, "a serving process with mmctl's agent, by its socket", returns=True
    ),
    "demo": Scheme("demo:source", False, "a small vision-language server: demo[:SCENARIO]", 60),
    "http": Scheme("page:readings", True, "a metrics page of an engine or exporter"),
    "https": Scheme("page:readings", True, "a metrics page over TLS"),
    "prom": Scheme("prometheus:readings", True, "a fleet, through its Prometheus server"),
    "otlp": Scheme("otlp:source", False, "request spans sent here: otlp:[HOST:]PORT, OTLP/HTTP"),
    "kmsg": Scheme(
        "kmsg:source", False, "the kernel's messages: Xids, PCIe errors", 1,
        checks=("kmsg:kernel_messages",),
    ),
    "ascend": Scheme("npu:readings", True, "Ascend NPUs, by DCMI or npu-smi", checks=("npu:tool",)),
    "amd": Scheme("rocm:readings", True, "AMD GPUs, by amd-smi or rocm-smi", checks=("rocm:tool",)),
    "host": Scheme(
        "host:readings", True, "processors, memory, pressure and network of this host",
        checks=("host:pressure_and_container",),
    ),
    "hook": Scheme(
        "hook:source", False, "segments of a process under the allocation hook",
        checks=("hook:compiler",),
    ),
}  # fmt: skip
"""Every scheme by its name before the colon."""

PLUGINS = "mmctl.sources"
"""Entry points of this group add schemes; each is a ``source`` function, never polled."""

_RETRY_S = 1.0
"""How long a polled source that could not be read is left alone."""

_WAIT_S = 0.2
"""How often a source is looked for that is waited for."""

_URI = re.compile(r"([a-z][a-z0-9+-]*):(.*)", re.DOTALL)
_ADDRESS = re.compile(
    r"(?:[a-z0-9-]+(?:\.[a-z0-9-]+)*|\[[0-9a-f:]+\]):\d{1,5}(?:/\S*)?", re.IGNORECASE
)


def open_sources(
    uris: Sequence[str],
    profile: Profile,
    stop: threading.Event,
    count: int | None = None,
    wait_s: float = 0.0,
) -> Iterator[AnyRecord]:
    """The records of all sources, merged by event time, until ``stop`` is set.

    Polled sources are read every ``profile.sampling.interval_s``, at most ``count`` times; any
    other ends when something in it has been read ``count`` times, or after its patience.
    A source that cannot be read gives an event ``source`` with state ``down`` and the reason,
    and is tried again at each tick. A live source that is not there yet is waited for
    ``wait_s``, which an event ``source`` with state ``waiting`` says. Raises UsageError for an
    unknown scheme, NoSourceError when no source gives anything, MmctlError for a broken file.
    """
    opened = [(uri, *_resolve(uri)) for uri in uris or profile.sources.default]
    feeds = []
    for uri, function, rest, polled in opened:
        if polled:
            records = _poll(uri, partial(function, rest, profile), profile, stop, count, wait_s)
        elif is_file(uri):
            records = _guard(uri, partial(function, rest, profile, stop), stop, count, 0.0)
        else:
            until = stop if count is None else _Until(stop, patience_s(uri) + wait_s)
            records = _guard(uri, partial(function, rest, profile, until), until, count, wait_s)
        feeds.append(streams.Feed(records, live=uri == "-" or not is_file(uri)))
    return _or_nothing(streams.merge(feeds, stop), len(feeds))


def _poll(
    uri: str, start: Callable[[], Iterator[list[AnyRecord]]], profile: Profile,
    stop: threading.Event, count: int | None, wait_s: float,
) -> Iterator[AnyRecord]:  # fmt: skip
    """Readings on schedule; one that cannot be had is said once and tried again."""
    readings: Iterator[list[AnyRecord]] | None = None
    reason = ""
    next_try = 0.0
    yield from _awaited(uri, start, wait_s, stop)
    try:
        for _ in streams.ticks(profile.sampling.interval_s, stop, count):
            if readings is None:
                if time.monotonic() < next_try:
                    continue
                readings = start()
            try:
                records = next(readings)
            except NoSourceError as error:
                readings, next_try = None, time.monotonic() + _RETRY_S
                if reason != str(error):
                    reason = str(error)
                    yield down(uri, reason)
                continue
            except StopIteration:
                return
            if reason:
                reason = ""
                yield up(uri)
            yield from records
    finally:
        if readings is not None:
            readings.close()  # type: ignore[attr-defined]


def _guard(
    uri: str, start: Callable[[], Iterator[AnyRecord]], stop: threading.Event,
    count: int | None, wait_s: float,
) -> Iterator[AnyRecord]:  # fmt: skip
    """Records of a source at its own pace; one that cannot be read ends with the reason, unless
    it was read before and may return."""
    seen: Counter[str] = Counter()
    end, reason, gone = time.monotonic() + wait_s, "", False
    returns = count is None and (scheme := SCHEMES.get(uri.partition(":")[0])) and scheme.returns
    while True:
        records, begun = start(), False
        try:
            for record in records:
                begun = True
                if gone:
                    gone = False
                    yield up(uri)
                yield record
                if isinstance(stop, _Until):
                    subject = streams.subject_of(record)
                    seen[subject or ""] += 1
                    if subject and seen[subject] == count:
                        return
            return
        except NoSourceError as error:
            if begun and returns and not stop.is_set():
                gone, reason = True, ""
                yield down(uri, f"{error}; it is waited for")
            elif gone:
                pass  # that was said
            elif begun or time.monotonic() >= end or stop.is_set():
                yield down(uri, str(error))
                return
            elif reason != str(error):
                reason = str(error)
                yield _waiting(uri, reason)
        finally:
            close = getattr(records, "close", None)
            if close is not None:
                close()
        if stop.wait(_WAIT_S) and gone:
            return


def _awaited(
    uri: str, start: Callable[[], Iterator[list[AnyRecord]]], wait_s: float, stop: threading.Event
) -> Iterator[AnyRecord]:
    """Says what is waited for, until a polled source gives a reading or the time is over."""
    end, reason = time.monotonic() + wait_s, ""
    while time.monotonic() < end and not stop.is_set():
        readings = start()
        try:
            next(readings, None)
            return
        except NoSourceError as error:
            if reason != str(error):
                reason = str(error)
                yield _waiting(uri, reason)
        finally:
            readings.close()  # type: ignore[attr-defined]
        stop.wait(_WAIT_S)


def _waiting(uri: str, reason: str) -> Event:
    return Event(
        ts_ns=time.time_ns(), what="source", state="waiting", message=reason, evidence={"uri": uri}
    )


class _Until(threading.Event):
    """Set when another event is set, or when a time has passed."""

    def __init__(self, outer: threading.Event, limit_s: float) -> None:
        super().__init__()
        self.outer = outer
        self.end = time.monotonic() + limit_s

    def is_set(self) -> bool:
        return self.outer.is_set() or time.monotonic() >= self.end

    def wait(self, timeout: float | None = None) -> bool:
        left = self.end - time.monotonic()
        self.outer.wait(max(min(left, left if timeout is None else timeout), 0.0))
        return self.is_set()


def patience_s(uri: str) -> float:
    """How long a live source may take to give its first record."""
    scheme = SCHEMES.get(uri.partition(":")[0])
    return scheme.patience_s if scheme is not None else 5.0


def _or_nothing(records: Iterator[AnyRecord], feeds: int) -> Iterator[AnyRecord]:
    """All records; NoSourceError in their place when every one of the feeds is down at first."""
    reasons: list[str] = []
    held: list[AnyRecord] = []
    for record in records:
        if isinstance(record, Event) and _is(record, "waiting"):
            yield record
            continue
        if len(reasons) < feeds and isinstance(record, Event) and _is(record, "down"):
            held.append(record)
            reasons.append(record.message or "")
            if len(reasons) == feeds:
                close = getattr(records, "close", None)
                if close:
                    close()
                raise NoSourceError("; ".join(reasons))
            continue
        yield from held
        yield record
        break
    else:
        yield from held
    yield from records


def _is(event: Event, state: str) -> bool:
    return event.what == "source" and event.state == state


def _resolve(uri: str) -> tuple[Any, str, bool]:
    """The function behind a URI, what it is to be called with, and whether it is polled.

    A scheme's name alone is that scheme; ``./demo`` is a file.
    """
    found = _URI.fullmatch(f"{uri}:" if uri in SCHEMES else uri)
    if found is None:
        _check_address(uri)
    if found is None or uri.startswith(("./", "/")):
        return load("files:source"), uri, False
    name, rest = found[1], found[2]
    if name in SCHEMES:
        scheme = SCHEMES[name]
        return load(scheme.target), uri if name in ("http", "https") else rest, scheme.polled
    added = plugins.named(PLUGINS)
    if name in added:
        return plugins.load(added[name]), rest, False
    if Path(uri).exists():
        return load("files:source"), uri, False
    _check_address(uri)
    known = [f"{scheme}:" for scheme in (*SCHEMES, *added)]
    raise UsageError(f"no source '{name}:'{nearest(f'{name}:', known, 'or a file')}")


def _check_address(uri: str) -> None:
    """UsageError for what is an address without its scheme."""
    if _ADDRESS.fullmatch(uri) and not Path(uri).exists():
        page = uri if "/" in uri else f"{uri}/metrics"
        raise UsageError(f"no source or file '{uri}'; for a metrics page give http://{page}")


def known(uris: Sequence[str]) -> None:
    """UsageError for a URI that names no source, before anything is opened."""
    for uri in uris:
        _resolve(uri)


def is_file(uri: str) -> bool:
    """Whether a source is a file or standard input: it has an end, and every reading is in it."""
    found = _URI.fullmatch(uri)
    return uri == "-" or found is None or (found[1] not in SCHEMES and Path(uri).exists())


def load(target: str) -> Any:
    """What ``module:function`` of a Scheme names."""
    module, function = target.split(":")
    return getattr(import_module(f"{__name__}.{module}"), function)


def up(uri: str) -> Event:
    """The event that says that a source which gave nothing gives again."""
    return Event(ts_ns=time.time_ns(), what="source", state="up", evidence={"uri": uri})


def down(uri: str, reason: str) -> Event:
    """The event that says a source gives nothing, and why."""
    return Event(
        ts_ns=time.time_ns(), what="source", state="down", message=reason, evidence={"uri": uri}
    )
