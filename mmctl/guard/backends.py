"""The backends: what is in them now, whether they take traffic, and which models they have."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any, NamedTuple

import msgspec
from yarl import URL

from mmctl.engine.errors import UsageError
from mmctl.engine.records import Device, Serving

_STALE_NS = 5_000_000_000


class Backend:
    """One serving engine as the guard sees it.

    ``down`` is why it takes no traffic and ``share`` the part of the requests that it may have;
    ``responses`` are the ways in which requests to it are treated now. ``cost_tokens`` is what
    the requests in work may come to take of ``capacity_tokens``, 0 where that is not known.
    """

    def __init__(self, url: str, devices: tuple[str, ...] = ()) -> None:
        self.url = _base(url)
        self.name = _name(self.url)
        self.devices = devices
        self.readings: dict[str, Device] = {}  # the latest of each of its devices
        self.page: Serving | None = None  # the latest of its own metrics page
        self.models: tuple[str, ...] = ()
        self.down: str | None = None
        self._share = 1.0
        self.epoch = 0  # counts the changes of its share
        self.drawn = 0.0
        self.responses: frozenset[str] = frozenset()  # in force now
        self.ordered: frozenset[str] = frozenset()  # by the breaker, until it closes
        self.in_flight = self.images = 0  # requests, and those with images among them
        self.cost_tokens = 0
        self.capacity_tokens = 0
        self.failures = 0  # requests in a row that it did not answer
        self.suspects: list[list[str]] = []  # images of each request that it broke off
        self.told_second = self.told = 0  # requests told to the breaker in this second
        self.mourned = False  # its images in work have been remembered

    @property
    def share(self) -> float:
        """The share of requests that may go to it, 0 to 1: less than 1 while it is tried again."""
        return self._share

    @share.setter
    def share(self, share: float) -> None:
        self._share = share
        self.epoch += 1
        self.drawn = 1.0 - share  # the first one that comes is taken

    def draw_again(self) -> None:
        """Whoever waits may be drawn for its share now: else what waits while the others are
        full would wait beside a backend that could have it."""
        if 0 < self._share < 1:
            self.epoch += 1

    @property
    def takes(self) -> bool:
        """Whether it may get traffic at all."""
        return self.down is None and self._share > 0

    def own_page(self, now_ns: int) -> Serving | None:
        """Its metrics page, where that is a source and not stale."""
        page = self.page
        return page if page is not None and now_ns - page.ts_ns < _STALE_NS else None

    @property
    def why_not(self) -> str:
        """Why it gets no traffic."""
        return self.down or ("held by the breaker" if self._share <= 0 else "it takes traffic")

    def has(self, model: str) -> bool:
        """Whether it serves ``model``; taken to be so while its list is not known."""
        return not model or not self.models or model in self.models


def _base(text: str) -> URL:
    try:
        url = URL(text)
    except ValueError as error:
        raise UsageError(f"--backend {text}: {error}") from None
    if url.scheme not in ("http", "https") or not url.host or url.query_string or url.fragment:
        raise UsageError(f"--backend {text} is no address such as http://127.0.0.1:8000")
    return url.with_path(url.path.rstrip("/").removesuffix("/v1") or "/")


def _name(url: URL) -> str:
    return f"{url.raw_host}:{url.port}{url.raw_path.rstrip('/')}"


def parse(texts: list[str]) -> list[Backend]:
    """Backends as named on a command line: ``URL`` or ``URL=DEVICE,DEVICE``.

    Raises UsageError for what is no address, and for one that is named twice.
    """
    found: dict[str, Backend] = {}
    for text in texts:
        url, _, devices = text.partition("=")
        backend = Backend(url, tuple(name for name in devices.split(",") if name))
        if backend.name in found:
            raise UsageError(f"--backend {backend.url} is named twice")
        found[backend.name] = backend
    if not found:
        raise UsageError("guard what? name a server: --backend http://127.0.0.1:8000")
    return list(found.values())


class Listing(NamedTuple):
    """An answer of /v1/models: the models, and when the first of them is said to be created."""

    models: tuple[str, ...] = ()
    created: float | None = None


class _Model(msgspec.Struct):
    id: str
    created: Any = None


class _Models(msgspec.Struct):
    data: list[_Model]


def listed(body: bytes) -> Listing:
    """What an answer of /v1/models names; nothing where it is no list."""
    try:
        data = msgspec.json.decode(body, type=_Models).data
    except (msgspec.DecodeError, RecursionError):
        return Listing()
    created = data[0].created if data else None
    return Listing(
        tuple(model.id for model in data),
        float(created) if isinstance(created, (int, float)) else None,
    )


def problem(error: BaseException) -> str:
    """Why a server could not be reached, in a few words."""
    cause = getattr(error, "os_error", error)
    number = getattr(cause, "errno", None)
    return os.strerror(number).lower() if number else str(cause) or type(cause).__name__


def held_back(backend: Backend, others: Iterable[Backend]) -> bool:
    """Whether a backend that is tried with a share takes no more than that of the requests.

    A share spares requests a backend that has just come back: it holds as long as one of
    ``others``, who could have them instead, takes all. Where all are being tried, their canaries
    have passed and waiting would only delay: then the share holds nothing.
    """
    return backend.share < 1 and any(other.takes and other.share >= 1 for other in others)
