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
        return Plan(
            policy=self.policy, devices=self.devices, batched_tokens=self.batched_tokens,
            sequences=self.sequences, encode_patches=self.encode_patches,
            encode_images=self.encode_images, decode_ratio=self.decode_ratio,
            inline_images=self.inline_images,
            age_s=policies.NEVER_S if self.age_s is None else self.age_s,
        )  # fmt: skip


def of(plan: Plan, model: str, queues: tuple[Limits, ...]) -> Chosen:
    """A sweep's plan, which names its devices, as a plan file."""
    assert plan.devices is not None
    return Chosen(
        model=model, devices=plan.devices, policy=plan.policy, queues=queues,
        batched_tokens=plan.batched_tokens, sequences=plan.sequences,
        encode_patches=plan.encode_patches, encode_images=plan.encode_images,
        age_s=None if plan.age_s >= policies.NEVER_S else plan.age_s,
        decode_ratio=plan.decode_ratio, inline_images=plan.inline_images,
    )  # fmt: skip


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
