"""``prom:URL`` — a fleet through its Prometheus server, by PromQL.

Every known metric is asked for at once; rates and quantiles are taken between the first and the
last of two moments, not by ``rate()``, which says too little of a series that is young.
"""

from __future__ import annotations

import http.client
import time
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlencode

import msgspec

from mmctl.engine.errors import NoSourceError
from mmctl.engine.profiles import Profile
from mmctl.engine.records import AnyRecord
from mmctl.engine.sources import device_exporters, engines
from mmctl.engine.sources.exposition import Sample
from mmctl.engine.sources.page import Client, canonical, in_words
from mmctl.engine.sources.serving import Instances

_BACK_S = 60.0
"""How far back the first reading looks, so that it has rates."""

_AMD_PREFIX = "[a-zA-Z0-9_]*"


def query() -> str:
    """The selector of every metric that some table knows."""
    names = sorted(engines.wanted() | set(device_exporters.FIELD_OF))
    return '{__name__=~"' + "|".join([*names, f"{_AMD_PREFIX}gpu_(gfx_activity|.*vram)"]) + '"}'


def readings(url: str, profile: Profile) -> Iterator[list[AnyRecord]]:
    """One reading of the whole fleet each time, by the label ``instance`` of each target.

    Raises NoSourceError when the server does not answer or knows none of the metrics.
    """
    client = Client(url if "//" in url else f"http://{url}", profile.sources.timeout_s)
    root = client.path.removesuffix("/metrics").rstrip("/")
    instances: dict[str, Instances] = {}
    selector = query()
    first = True
    try:
        while True:
            now_s = time.time()
            if first:
                for target, samples in _ask(client, root, selector, now_s - _BACK_S).items():
                    own = instances.setdefault(target, Instances(target, target))
                    own.records(samples, int((now_s - _BACK_S) * 1e9))
            found = _ask(client, root, selector, now_s)
            records: list[AnyRecord] = []
            for target, samples in sorted(found.items()):
                own = instances.setdefault(target, Instances(target, target))
                records += own.records(samples, int(now_s * 1e9))
                records += device_exporters.devices(samples, target, int(now_s * 1e9))
            if not records:
                raise NoSourceError(f"{client.base} knows no metric of an engine or exporter")
            first = False
            yield records
    finally:
        client.close()


def _ask(client: Client, root: str, selector: str, at_s: float) -> dict[str, list[Sample]]:
    """An instant query: samples by target."""
    body = urlencode({"query": selector, "time": f"{at_s:.3f}"}).encode()
    try:
        status, content = client.get(f"{root}/api/v1/query", body)
        answer: Any = msgspec.json.decode(content)
    except (OSError, http.client.HTTPException) as error:
        raise NoSourceError(f"{client.base} does not answer: {in_words(error)}") from None
    except msgspec.DecodeError:
        raise NoSourceError(f"{client.base} answers, but not as a Prometheus server does") from None
    if status != 200 or not isinstance(answer, dict) or answer.get("status") != "success":
        said = answer.get("error", "") if isinstance(answer, dict) else ""
        raise NoSourceError(f"{client.base} refuses the query with HTTP {status}: {said}"[:200])
    found: dict[str, list[Sample]] = {}
    for entry in answer.get("data", {}).get("result", ()):
        labels = dict(entry["metric"])
        name = canonical(labels.pop("__name__", ""))
        if name is None:
            continue
        target = labels.pop("instance", "")
        labels.pop("job", None)
        # A target's own ``instance`` or ``job`` was moved aside when it was scraped.
        value = float(entry["value"][1])
        lowered = {key.lower(): text for key, text in labels.items()}
        found.setdefault(target, []).append(Sample(name, lowered, value))
    return found
