"""What the guard answers itself: a status, a reason for machines, when to try again."""

from __future__ import annotations

import math

import msgspec
from aiohttp import web

REASON_HEADER = "X-Mmctl-Reason"


class Refusal(Exception):
    """A request that gets an error from the guard; ``code`` is the reason, for machines.

    ``ours`` False says that a backend failed it, and the guard only tells.
    """

    def __init__(
        self, status: int, code: str, message: str, retry_after_s: float | None = None,
        ours: bool = True,
    ) -> None:  # fmt: skip
        super().__init__(message)
        self.status, self.code, self.message = status, code, message
        self.retry_after_s, self.ours = retry_after_s, ours

    def document(self) -> bytes:
        """The body, in the shape in which OpenAI-compatible servers tell errors."""
        error = {"message": self.message, "type": "mmctl_guard", "param": None, "code": self.code}
        return msgspec.json.encode({"error": error})

    def response(self, more: dict[str, str] | None = None) -> web.Response:
        """The refusal as an HTTP answer, with the headers ``more``."""
        headers = {REASON_HEADER: self.code, **(more or {})}
        if self.retry_after_s is not None:
            headers["Retry-After"] = str(max(1, math.ceil(self.retry_after_s)))
        return web.Response(
            status=self.status, body=self.document(), headers=headers,
            content_type="application/json",
        )  # fmt: skip
