"""Published figures of devices, each with its source, and a processor's own from its features."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import NamedTuple

import msgspec

from mmctl.engine.records import Basis

PRECISIONS = ("fp32", "bf16", "fp16", "int8")
_PLAIN = ("bandwidth", "memory", "power", "idle", "link")


class Figure(NamedTuple):
    """A figure and where it is from."""

    value: float
    source: str
    basis: Basis = "published"


class Published(msgspec.Struct, frozen=True, kw_only=True):
    """A device of the table. ``rates`` are operations per second by precision, dense."""

    key: str
    name: str
    match: str
    kind: str
    rates: dict[str, Figure]
    bandwidth: Figure
    memory: Figure
    power: Figure
    idle: Figure
    link: Figure
    link_class: str | None = None
    claimed: dict[str, Figure] = {}


@cache
def table() -> dict[str, Published]:
    """Every device of the table by its key."""
    import tomli

    written = tomli.loads((Path(__file__).parent / "table.toml").read_text("utf-8"))
    sources = written["sources"]
    found = {}
    for key, values in written["devices"].items():
        figures = {
            name: Figure(float(value[0]), sources[value[1]])
            for name, value in values.items()
            if isinstance(value, list)
        }
        found[key] = Published(
            key=key, name=values["name"], match=values["match"], kind=values["kind"],
            link_class=values.get("link_class"),
            rates={n: f for n, f in figures.items() if n not in _PLAIN and n[:7] != "claimed"},
            claimed={n[8:]: f for n, f in figures.items() if n[:7] == "claimed"},
            bandwidth=figures["bandwidth"], memory=figures["memory"], power=figures["power"],
            idle=figures["idle"], link=figures["link"],
        )  # fmt: skip
    return found


def find(name: str) -> Published | None:
    """The device of the table that a driver calls ``name``."""
    return next((d for d in table().values() if re.search(d.match, name)), None)


def processor_rates(
    flags: Mapping[str, bool], vendor: str, family: int, cores: int, clock_hz: float | None
) -> dict[str, Figure]:
    """Peak operations per second of a processor by precision, from its instruction sets.

    ``flags`` are torch's names of them (``avx512_f``, ``amx_bf16`` …). Only what the processor
    computes by itself is there: without such instructions torch would convert. Empty where the
    clock or the width is not known.
    """
    width = _fp32_per_cycle(flags, vendor, family)
    if width is None or not clock_hz:
        return {}
    per_cycle = {"fp32": (float(width), "fused multiply-add in fp32")}
    if flags.get("amx_bf16"):
        per_cycle["bf16"] = 1024, "AMX bf16"
    elif flags.get("avx512_bf16"):
        per_cycle["bf16"] = 2 * width, "AVX-512 bf16 dot products"
    if flags.get("amx_fp16"):
        per_cycle["fp16"] = 1024, "AMX fp16"
    elif flags.get("avx512_fp16"):
        per_cycle["fp16"] = 2 * width, "AVX-512 fp16"
    if flags.get("amx_int8"):
        per_cycle["int8"] = 2048, "AMX int8"
    elif flags.get("avx512_vnni") or flags.get("avx_vnni"):
        per_cycle["int8"] = 4 * width, "VNNI int8 dot products"
    return {
        precision: Figure(
            cores * clock_hz * rate,
            f"{cores} cores × {clock_hz / 1e9:.2f} GHz × {rate:.0f} a cycle ({what})", "modelled",
        )
        for precision, (rate, what) in per_cycle.items()
    }  # fmt: skip


def _fp32_per_cycle(flags: Mapping[str, bool], vendor: str, family: int) -> int | None:
    """Operations of fp32 multiply-add a cycle and core; None for what is not known here."""
    if flags.get("avx512_f"):
        # Zen 4 and before run 512 bits in two halves; Xeons and Zen 5 have two whole units.
        return 32 if vendor == "AuthenticAMD" and family < 26 else 64
    if flags.get("avx2") and flags.get("fma3"):
        return 32
    return None
