"""The backends: what is in them now, whether they take traffic, and which models they have."""

from __future__ import annotations

import msgspec
from yarl import URL

from mmctl.engine.errors import UsageError


class Backend:
    """One serving engine as the guard sees it.

    ``down`` is why it takes no traffic, ``share`` the part of the requests that it may have.
    """

    def __init__(self, url: str, devices: tuple[str, ...] = ()) -> None:
        self.url = _base(url)
        self.name = _name(self.url)
        self.devices = devices
        self.models: tuple[str, ...] = ()
        self.down: str | None = None
        self.share = 1.0
        self.failures = 0  # requests in a row that it did not answer

    @property
    def takes(self) -> bool:
        """Whether it may get traffic at all."""
        return self.down is None and self.share > 0


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


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Model]


def listed(body: bytes) -> tuple[str, ...] | None:
    """The models that an answer of /v1/models names; None where it names none."""
    try:
        return tuple(model.id for model in msgspec.json.decode(body, type=_Models).data)
    except (msgspec.DecodeError, RecursionError):
        return None
