"""A plan: stages on devices, replicas and limits, as a file that a simulation takes."""

from __future__ import annotations

from pathlib import Path

import msgspec

from mmctl.engine import units
from mmctl.engine.errors import MmctlError, UsageError, suggestion
from mmctl.engine.schedule import policies
from mmctl.engine.schedule.sweep import Plan

SCHEMA = 1


class Slo(msgspec.Struct, frozen=True, kw_only=True):
    """The objective: ``share_ratio`` of the requests get their first token within ``ttft_s`` and
    each further one within ``itl_s`` on average."""

    ttft_s: float
    itl_s: float
    share_ratio: float


_WORDS = {
    "ttft": ("ttft_s", "seconds"), "itl": ("itl_s", "seconds"), "share": ("share_ratio", "ratio")
}  # fmt: skip


def slo(text: str, usual: Slo) -> Slo:
    """``ttft=2s,itl=100ms,share=95%``, what is left out as ``usual``; UsageError otherwise."""
    given: dict[str, float] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        word, equals, value = part.partition("=")
        if word not in _WORDS or not equals:
            raise UsageError(
                f"--slo '{part}': say ttft=2s, itl=100ms or share=95%{suggestion(word, _WORDS)}"
            )
        field, unit = _WORDS[word]
        try:
            given[field] = units.parse(value, unit)
        except ValueError as error:
            raise UsageError(f"--slo {word}: {error}") from None
        if given[field] <= 0 or (unit == "ratio" and given[field] > 1):
            raise UsageError(f"--slo {part}: no plan could keep that")
    return msgspec.structs.replace(usual, **given)


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """A modality's queue: ``depth`` is what may wait before a new request would come too late
    for its first token; absent where none of that modality came."""

    queue: str
    requests_per_s: float
    wait_p99_s: float | None
    depth: int | None


class Chosen(msgspec.Struct, frozen=True, kw_only=True):
    """A plan file: ``devices`` with their stages as ``--devices`` takes them, and the limits of
    policy and engine; ``age_s`` is absent where no request ever goes before its turn."""

    schema: int = SCHEMA
    model: str
    devices: str
    policy: str
    batched_tokens: int
    sequences: int
    encode_patches: int
    encode_images: int
    age_s: float | None
    decode_ratio: float
    inline_images: int
    queues: tuple[Limits, ...] = ()

    def settings(self) -> Plan:
        """The same as a sweep's plan, which the simulator takes."""
        values = {name: getattr(self, name) for name in _OF_PLAN}
        return Plan(**{**values, "age_s": policies.NEVER_S if self.age_s is None else self.age_s})


_OF_PLAN = [name for name in Chosen.__struct_fields__ if hasattr(Plan, name)]
"""What a plan file says of a sweep's plan: the fields that both have."""


def of(plan: Plan, model: str, queues: tuple[Limits, ...]) -> Chosen:
    """A sweep's plan, which names its devices, as a plan file."""
    assert plan.devices is not None
    values = {name: getattr(plan, name) for name in _OF_PLAN}
    age_s = None if plan.age_s >= policies.NEVER_S else plan.age_s
    return Chosen(model=model, queues=queues, **{**values, "age_s": age_s})


def read(path: Path) -> Chosen:
    """The plan that ``schedule plan`` wrote (``--out``, or its whole JSON); MmctlError else."""
    try:
        written = msgspec.json.decode(path.read_bytes())
        if isinstance(written, dict) and isinstance(written.get("plan"), dict):
            written = written["plan"]
        chosen = msgspec.convert(written, Chosen)
    except OSError as error:
        raise MmctlError(f"cannot read {path}: {error.strerror}") from None
    except (msgspec.DecodeError, msgspec.ValidationError, UnicodeDecodeError) as error:
        raise MmctlError(
            f"{path} is no plan ({error}): mmctl schedule plan TRACE --out FILE writes one"
        ) from None
    if chosen.schema != SCHEMA:
        raise MmctlError(f"{path} is of schema {chosen.schema}, this mmctl reads {SCHEMA}")
    if min(chosen.batched_tokens, chosen.sequences, chosen.encode_images) < 1:
        raise MmctlError(f"{path} is no plan: its limits must be at least 1")
    return chosen
