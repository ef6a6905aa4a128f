"""A workload by its description, so that each process can make it for itself."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np

from mmctl.engine.errors import UsageError
from mmctl.engine.schedule import generate, workload
from mmctl.engine.schedule.workload import Workload


class Source(msgspec.Struct, frozen=True, kw_only=True):
    """``trace`` is a file, a folder of ServeGen clients, a table of quantiles, or one of the
    generated: ``azure`` (published quantiles) and ``poisson``.

    ``count`` is how many requests are generated, ``limit`` how many are read of a file;
    ``repeat_ratio`` the share of images that an earlier request sent; ``saturated`` lets all
    requests arrive at once.
    """

    trace: str
    rate_per_s: float | None = None
    count: int = 2000
    limit: int | None = None
    seed: int = 1
    clients: tuple[int, ...] | None = None
    output_tokens: int | None = None
    repeat_ratio: float = 0.0
    saturated: bool = False

    def read(self) -> Workload:
        """The requests. UsageError where a rate is missing, MmctlError for a trace without any."""
        work = self._made()
        if self.repeat_ratio:
            work = generate.with_repeated_images(work, self.repeat_ratio, self.seed)
        if self.saturated:
            work = msgspec.structs.replace(work, arrival_s=np.zeros(work.requests))
        return work

    def _made(self) -> Workload:
        path = Path(self.trace)
        count = self.count
        if self.trace == "poisson":
            return generate.poisson(rate_per_s=self._rate(), count=count, seed=self.seed)
        if self.trace == "azure":
            return generate.from_quantiles(rate_per_s=self._rate(), count=count, seed=self.seed)
        if path.is_dir():
            return generate.from_servegen(
                path, count=count, seed=self.seed, rate_per_s=self.rate_per_s,
                clients=self.clients,
            )  # fmt: skip
        if generate.holds_quantiles(path):
            return generate.from_quantiles(
                rate_per_s=self._rate(), count=count, seed=self.seed, quantiles=path
            )
        return workload.read(path, limit=self.limit, output_tokens=self.output_tokens)

    def part(self, count: int) -> Source:
        """The same, so many requests of it."""
        return msgspec.structs.replace(self, count=count, limit=count)

    def _rate(self) -> float:
        if self.rate_per_s is None or self.rate_per_s <= 0:
            raise UsageError(
                f"'{self.trace}' is generated: say how many requests a second (--rate)"
            )
        return self.rate_per_s
