"""Could what runs here run there? Instruction set, memory layout, types and room, with reasons.

A place is described by a file, a name of the shipped table, or the machine's own facts. What a
description does not say is unknown, and said to be: it neither blocks nor allows.
"""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import msgspec

from mmctl.engine import units
from mmctl.engine.devices import results, table
from mmctl.engine.errors import MmctlError, UsageError, nearest
from mmctl.engine.schedule import fleet
from mmctl.engine.schedule.code_objects import CodeObject

MIB = 1 << 20
_CAPABILITY = {
    "h100_sxm": 90, "h200_sxm": 90, "a100_sxm": 80, "l40s": 89, "l4": 89, "rtx4090": 89,
    "rtxpro6000": 120,
}  # fmt: skip
_GPU_TYPES = ("float32", "float16", "bfloat16", "int8")
_DTYPES = {
    "ascend310p": ("float16", "int8", "float32"),
    "ascend910b": ("float32", "float16", "bfloat16", "int8"),
}


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """A device or machine, as far as it is known; sizes and addresses in bytes.

    ``sm`` is the compute capability times ten. ``base_address`` and ``end_address`` bound where
    memory can lie; ``image_alignment_bytes`` is what a frozen image's segments are aligned to.
    """

    name: str = ""
    kind: Literal["gpu", "npu", "cpu"]
    isa: str | None = None
    sm: int | None = None
    cpu_features: tuple[str, ...] | None = None
    page_bytes: int | None = None
    image_alignment_bytes: int | None = None
    segment_bytes: int | None = None
    base_address: int | None = None
    end_address: int | None = None
    dtypes: tuple[str, ...] | None = None
    memory_bytes: int | None = None


class Needs(msgspec.Struct, frozen=True, kw_only=True):
    """What the load asks of any place: its code, CPU features, types and memory, where known.

    With ``rebuilt_by``, an engine, the load's graph is rebuilt at the target: none of its code,
    its layout or its addresses moves.
    """

    rebuilt_by: str | None = None
    code: Mapping[CodeObject, int] | None = None
    cpu_features: tuple[str, ...] | None = None
    dtypes: tuple[str, ...] | None = None
    memory_bytes: int | None = None


class Reason(msgspec.Struct, frozen=True, kw_only=True):
    """One check: whether it allows or blocks, or cannot be told, and why."""

    check: str
    verdict: Literal["allows", "blocks", "unknown"]
    why: str


def place(text: str) -> Place:
    """A place by name (``here``, the published devices), from a JSON description, or from a result
    of ``mmctl benchmark device``: the published device that was measured, else its kind and memory.
    """
    if text == "here":
        return here()
    path = Path(text)
    if path.is_file() and results.is_result(path):
        measured = results.device(path)
        if (published := table.find(measured.name)) is not None:
            return place(published.key)
        return Place(
            name=measured.name, kind=measured.kind,  # type: ignore[arg-type]
            memory_bytes=measured.memory_bytes,
        )  # fmt: skip
    if path.is_file():
        try:
            found = msgspec.json.decode(path.read_bytes(), type=Place)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise MmctlError(f"{path} describes no device: {error}") from None
        return found if found.name else msgspec.structs.replace(found, name=path.stem)
    known = fleet.tables()[0]
    if text not in known:
        names = ("here", *known)
        raise UsageError(f"unknown device '{text}'{nearest(text, names, 'or a JSON description')}")
    peaks = known[text]
    gpu = text in _CAPABILITY
    return Place(
        name=text, kind=peaks.kind,  # type: ignore[arg-type]
        isa="cuda" if gpu else "x86_64" if text == "xeon" else text,
        sm=_CAPABILITY.get(text), segment_bytes=2 * MIB if gpu else None,
        dtypes=_DTYPES.get(text, _GPU_TYPES), memory_bytes=peaks.memory_bytes,
    )  # fmt: skip


def here() -> Place:
    """This machine's processor: instruction set, features, page size, address bits, memory."""
    text = ""
    with suppress(OSError):
        text = Path("/proc/cpuinfo").read_text("utf-8", "replace")
    flags = re.search(r"^(?:flags|Features)\s*:\s*(.+)$", text, re.MULTILINE)
    bits = re.search(r"(\d+) bits virtual", text)
    huge = _huge_page_bytes()
    return Place(
        name=platform.node() or "here", kind="cpu", isa=platform.machine().lower() or None,
        cpu_features=tuple(sorted(flags[1].split())) if flags else None,
        page_bytes=os.sysconf("SC_PAGE_SIZE"), image_alignment_bytes=huge,
        base_address=0x10000 if bits else None,
        end_address=1 << (int(bits[1]) - 1) if bits else None,
        dtypes=("float32", "float16", "bfloat16", "int8"),
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
    )  # fmt: skip


def _huge_page_bytes() -> int | None:
    path = Path("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size")
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def check(source: Place, target: Place, needs: Needs) -> tuple[str, list[Reason]]:
    """``migratable``, ``not_migratable`` or ``unknown``, with every reason."""
    if needs.rebuilt_by:
        why = f"{needs.rebuilt_by} rebuilds the graph there: no code, layout or address moves"
        reasons = [
            Reason(check="instruction set", verdict="allows", why=why),
            _types(source, target, needs),
            _memory(target, needs),
        ]
        blocked = any(reason.verdict == "blocks" for reason in reasons)
        return ("not_migratable" if blocked else "migratable"), reasons
    reasons = [
        _instructions(source, target, needs),
        _features(source, target, needs),
        _multiple("page size", source.page_bytes, target.page_bytes),
        _multiple("image alignment", source.image_alignment_bytes, target.image_alignment_bytes),
        _multiple("segment size", source.segment_bytes, target.segment_bytes),
        _addresses(source, target),
        _types(source, target, needs),
        _memory(target, needs),
    ]
    verdicts = {reason.verdict for reason in reasons}
    if "blocks" in verdicts:
        return "not_migratable", reasons
    return ("unknown" if reasons[0].verdict == "unknown" else "migratable"), reasons


def _instructions(source: Place, target: Place, needs: Needs) -> Reason:
    def told(verdict: Any, why: str) -> Reason:
        return Reason(check="instruction set", verdict=verdict, why=why)

    device = [code for code in needs.code or () if code.kind != "host"]
    if target.sm is not None and device:
        return _cuda(device, target.sm, told)
    host = {code.target for code in needs.code or () if code.kind == "host"}
    if target.kind == "cpu" and host and target.isa:
        if target.isa in host:
            return told("allows", f"the code holds a build for {target.isa}")
        return told("blocks", f"the code is for {', '.join(sorted(host))}, not for {target.isa}")
    if source.isa is None or target.isa is None:
        return told("unknown", "a description names no instruction set (isa)")
    if source.isa != target.isa:
        return told(
            "blocks", f"{source.isa} code does not run on {target.isa}: the graph must be rebuilt"
        )
    if source.sm is not None and target.sm is not None and source.sm != target.sm:
        if source.sm // 10 == target.sm // 10 and source.sm < target.sm:
            return told("allows", f"sm_{source.sm} code runs on sm_{target.sm}, of one generation")
        return told(
            "unknown",
            f"sm_{source.sm} code runs on sm_{target.sm} only with PTX: name the binary (--code)",
        )
    same = f"sm_{target.sm}" if target.sm else target.isa
    return told("allows", f"both are {same}")


def _cuda(device: list[CodeObject], sm: int, told: Any) -> Reason:
    """A cubin runs on its own generation from its own capability up; PTX on any later one."""
    native = [c.sm for c in device if c.kind == "cubin" and c.sm // 10 == sm // 10 and c.sm <= sm]
    if native:
        reason: Reason = told("allows", f"a cubin for sm_{max(native)} runs on sm_{sm}")
        return reason
    later = [c.sm for c in device if c.kind == "ptx" and c.sm <= sm]
    if later:
        reason = told(
            "allows", f"PTX for compute_{max(later)} is compiled for sm_{sm} at the first start"
        )
        return reason
    held = ", ".join(dict.fromkeys(c.target for c in sorted(device)))
    reason = told("blocks", f"the code holds {held}: nothing that sm_{sm} could run")
    return reason


def _features(source: Place, target: Place, needs: Needs) -> Reason:
    name = "cpu features"
    if target.kind != "cpu":
        return Reason(check=name, verdict="allows", why="the target is no CPU")
    wanted = needs.cpu_features if needs.cpu_features is not None else source.cpu_features
    if source.kind != "cpu" and needs.cpu_features is None:
        return Reason(check=name, verdict="allows", why="the source is no CPU and none is asked")
    if wanted is None or target.cpu_features is None:
        return Reason(check=name, verdict="unknown", why="a description names no cpu_features")
    have = {feature.lower() for feature in target.cpu_features}
    missing = sorted({feature.lower() for feature in wanted} - have)
    if missing:
        some = ", ".join(missing[:8]) + (f" and {len(missing) - 8} more" if missing[8:] else "")
        return Reason(check=name, verdict="blocks", why=f"the target lacks {some}")
    return Reason(check=name, verdict="allows", why=f"all {len(set(wanted))} are there")


def _multiple(name: str, source: int | None, target: int | None) -> Reason:
    """What is laid out by the source's size must fall on the target's boundaries."""
    if not source or not target:
        return Reason(check=name, verdict="unknown", why="a description does not say it")
    if source % target:
        return Reason(
            check=name, verdict="blocks",
            why=f"{units.show_bytes(source)} boundaries do not fall on those of "
            f"{units.show_bytes(target)}",
        )  # fmt: skip
    return Reason(
        check=name, verdict="allows",
        why=f"{units.show_bytes(source)} is a multiple of {units.show_bytes(target)}",
    )  # fmt: skip


def _addresses(source: Place, target: Place) -> Reason:
    name = "address range"
    bounds = (source.base_address, source.end_address, target.base_address, target.end_address)
    if source.base_address is not None and target.base_address is not None and None in bounds:
        if source.base_address == target.base_address:
            return Reason(check=name, verdict="allows", why=f"both begin at {bounds[0]:#x}")
        return Reason(
            check=name, verdict="blocks",
            why=f"the source begins at {bounds[0]:#x}, the target at {bounds[2]:#x}: "
            "addresses in the image would point elsewhere",
        )  # fmt: skip
    if None in bounds:
        return Reason(check=name, verdict="unknown", why="a description does not say it")
    a, b, c, d = (int(bound) for bound in bounds if bound is not None)
    if c <= a and b <= d:
        return Reason(check=name, verdict="allows", why=f"{a:#x}–{b:#x} lies in {c:#x}–{d:#x}")
    shared = max(0, min(b, d) - max(a, c))
    return Reason(
        check=name, verdict="blocks",
        why=f"of {a:#x}–{b:#x} only {units.show_bytes(shared)} lie in {c:#x}–{d:#x}",
    )  # fmt: skip


def _types(source: Place, target: Place, needs: Needs) -> Reason:
    name = "data types"
    wanted = needs.dtypes or source.dtypes
    if wanted is None or target.dtypes is None:
        return Reason(check=name, verdict="unknown", why="a description names no dtypes")
    missing = [dtype for dtype in wanted if dtype not in target.dtypes]
    if missing and needs.dtypes:
        return Reason(check=name, verdict="blocks", why=f"the target lacks {', '.join(missing)}")
    if missing:
        why = f"the target lacks {', '.join(missing)}: say which the load uses (--dtypes)"
        return Reason(check=name, verdict="unknown", why=why)
    return Reason(check=name, verdict="allows", why=f"{', '.join(wanted)} are there")


def _memory(target: Place, needs: Needs) -> Reason:
    name = "memory"
    if needs.memory_bytes is None or target.memory_bytes is None:
        return Reason(check=name, verdict="unknown", why="say what the load holds (--memory)")
    have, want = units.show_bytes(target.memory_bytes), units.show_bytes(needs.memory_bytes)
    if needs.memory_bytes > target.memory_bytes:
        return Reason(check=name, verdict="blocks", why=f"{want} do not go into {have}")
    return Reason(check=name, verdict="allows", why=f"{want} go into {have}")
