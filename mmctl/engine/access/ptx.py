"""PTX with a trace call before every access to global and shared memory.

The text is only added to: every instruction, register, label, predicate and source line stays
as it was. What is added works in registers of its own. Each access appends a record of 24 bytes
to a ring in global memory:

    u64 token_id · u32 pc · u32 kind · u64 address

``pc`` numbers the memory instructions of the module from 0. Of ``kind``, bit 0 is a store,
bit 1 an atomic, bits 2–3 the space (0 global, 1 shared, 2 generic), bits 8–23 the bytes. The
host places the ring through the module's globals (``GLOBALS``) before the launch.
"""

from __future__ import annotations

import bisect
import re
from collections.abc import Iterator

import msgspec

from mmctl.engine.errors import MmctlError

SPACES = ("global", "shared", "generic")
GLOBALS = {
    "mmctl_ring": "address of the ring; 0 records nothing",
    "mmctl_slots": "records that the ring holds",
    "mmctl_count": "records asked for so far; above mmctl_slots the oldest are overwritten",
    "mmctl_token_base": "token of the first thread",
    "mmctl_threads_per_token": "threads that work on one token: 32 makes it one a warp",
    "mmctl_first_token": "records only tokens from here …",
    "mmctl_token_count": "… this many; 0 records all",
}
"""The 64-bit globals of an instrumented module; all but the ring have useful values already."""

_RUNTIME = """
.visible .global .align 8 .u64 mmctl_ring = 0;
.visible .global .align 8 .u64 mmctl_slots = 1;
.visible .global .align 8 .u64 mmctl_count = 0;
.visible .global .align 8 .u64 mmctl_token_base = 0;
.visible .global .align 8 .u64 mmctl_threads_per_token = 32;
.visible .global .align 8 .u64 mmctl_first_token = 0;
.visible .global .align 8 .u64 mmctl_token_count = 0;

.func mmctl_trace(
	.param .b64 mmctl_address,
	.param .b32 mmctl_pc,
	.param .b32 mmctl_kind
)
{
	.reg .pred %p<4>;
	.reg .b32 %r<16>;
	.reg .b64 %rd<16>;

	ld.global.u64 %rd1, [mmctl_ring];
	setp.eq.u64 %p1, %rd1, 0;
	@%p1 bra MMCTL_DONE;
	mov.u32 %r1, %ctaid.z;
	mov.u32 %r2, %nctaid.y;
	mov.u32 %r3, %ctaid.y;
	mad.lo.u32 %r4, %r1, %r2, %r3;
	mov.u32 %r5, %nctaid.x;
	mov.u32 %r6, %ctaid.x;
	mad.lo.u32 %r7, %r4, %r5, %r6;
	mov.u32 %r1, %ntid.x;
	mov.u32 %r2, %ntid.y;
	mov.u32 %r3, %ntid.z;
	mul.lo.u32 %r4, %r1, %r2;
	mul.lo.u32 %r5, %r4, %r3;
	mul.wide.u32 %rd2, %r7, %r5;
	mov.u32 %r6, %tid.z;
	mov.u32 %r8, %tid.y;
	mov.u32 %r9, %tid.x;
	mad.lo.u32 %r10, %r6, %r2, %r8;
	mad.lo.u32 %r11, %r10, %r1, %r9;
	cvt.u64.u32 %rd3, %r11;
	add.u64 %rd4, %rd2, %rd3;
	ld.global.u64 %rd5, [mmctl_threads_per_token];
	div.u64 %rd6, %rd4, %rd5;
	ld.global.u64 %rd7, [mmctl_token_base];
	add.u64 %rd6, %rd6, %rd7;
	ld.global.u64 %rd8, [mmctl_token_count];
	setp.eq.u64 %p2, %rd8, 0;
	@%p2 bra MMCTL_RECORD;
	ld.global.u64 %rd9, [mmctl_first_token];
	sub.u64 %rd10, %rd6, %rd9;
	setp.ge.u64 %p3, %rd10, %rd8;
	@%p3 bra MMCTL_DONE;
MMCTL_RECORD:
	mov.u64 %rd11, mmctl_count;
	atom.global.add.u64 %rd12, [%rd11], 1;
	ld.global.u64 %rd13, [mmctl_slots];
	rem.u64 %rd12, %rd12, %rd13;
	mul.lo.u64 %rd12, %rd12, 24;
	add.u64 %rd1, %rd1, %rd12;
	ld.param.u64 %rd14, [mmctl_address];
	ld.param.u32 %r12, [mmctl_pc];
	ld.param.u32 %r13, [mmctl_kind];
	st.global.u64 [%rd1], %rd6;
	st.global.u32 [%rd1+8], %r12;
	st.global.u32 [%rd1+12], %r13;
	st.global.u64 [%rd1+16], %rd14;
MMCTL_DONE:
	ret;
}
"""


class Site(msgspec.Struct, frozen=True, kw_only=True):
    """A memory instruction: its number, where it stands, and what it touches."""

    pc: int
    kernel: str
    line: int
    source_file: str | None
    source_line: int | None
    instruction: str
    space: str
    kind: str
    size_bytes: int | None
    predicate: str | None


class Instrumented(msgspec.Struct, frozen=True, kw_only=True):
    """The new text, its sites by ``pc``, and instructions that touch memory but are left out."""

    text: str
    sites: list[Site]
    skipped: list[str]


_MEMORY = re.compile(
    r"(?P<guard>@!?[%$\w]+\s+)?"
    r"(?P<op>(?:ld|ldu|st|atom|red|ldmatrix|stmatrix|cp\.async)(?:\.[\w:]+)+)\s+(?P<rest>[^;{}]*"
    r"(?:\{[^;{}]*\}[^;{}]*)*);"
)
_UNTRACED = re.compile(r"\b((?:cp\.async\.bulk|cp\.reduce|wmma\.(?:load|store)|tcgen05|multimem|"
                       r"red\.async|st\.async|st\.bulk|tensormap|tex|surf|suld|sust|wgmma)"
                       r"[\w.:]*)")  # fmt: skip
_ADDRESS = re.compile(r"\[\s*([^\]\s+,]+)\s*(?:\+\s*(-?\w+))?\s*\]")
_BYTES = {"8": 1, "16": 2, "32": 4, "64": 8, "128": 16, "16x2": 4, "8x4": 4}
_TYPE = re.compile(r"(?:b|u|s|f|bf|e4m3|e5m2)(8|16x2|16|32|64|128)")


def instrument(text: str) -> Instrumented:
    """Instrument a module.

    Raises MmctlError for text that is no PTX module, is instrumented already or uses 32-bit
    addresses.
    """
    blank = _without_comments(text)
    if not re.search(r"^\s*\.version\s", blank, re.MULTILINE):
        raise MmctlError("this is no PTX: it has no .version")
    if "mmctl_trace" in blank:
        raise MmctlError("this module is instrumented already")
    size = re.search(r"^[ \t]*\.address_size[ \t]+(\d+)[^\n]*\n", blank, re.MULTILINE)
    if size is None or size[1] != "64":
        raise MmctlError("only modules with .address_size 64 can be instrumented")
    version = re.search(r"\.version\s+(\d+)\.(\d+)", blank)
    if version is None or (int(version[1]), int(version[2])) < (6, 0):
        raise MmctlError("PTX before version 6.0 cannot be instrumented")
    sites: list[Site] = []
    pieces, done = [text[: size.end()], _RUNTIME], size.end()
    where = _Place(text, blank)
    for start, match in _instructions(blank):
        traced = _trace(match, len(sites), where, start)
        for call, site in traced:
            pieces += [text[done:start], call]
            done = start
            sites.append(site)
    pieces.append(text[done:])
    skipped = sorted({found[1] for found in _UNTRACED.finditer(blank)})
    return Instrumented(text="".join(pieces), sites=sites, skipped=skipped)


def _without_comments(text: str) -> str:
    """The text with comments and strings blanked, of the same length."""

    def blank(match: re.Match[str]) -> str:
        return re.sub(r"[^\n]", " ", match[0])

    return re.sub(r"//[^\n]*|/\*.*?\*/|\"[^\"\n]*\"", blank, text, flags=re.DOTALL)


def _instructions(blank: str) -> Iterator[tuple[int, re.Match[str]]]:
    """Memory instructions in order, each at the beginning of its statement."""
    at = 0
    while True:
        found = _MEMORY.search(blank, at)
        if found is None:
            return
        before = blank[: found.start()].rstrip()
        if before.endswith((";", "{", "}", ":")) or _after_directive(blank, found.start()):
            yield found.start(), found
            at = found.end()
        else:
            at = found.start() + 1


def _after_directive(blank: str, at: int) -> bool:
    """Whether the line before is a ``.loc`` or another directive without a semicolon."""
    lines = blank[:at].rstrip().rsplit("\n", 1)
    last = lines[-1].strip()
    begins_line = blank[:at].rsplit("\n", 1)[-1].strip() == ""
    return begins_line and last.startswith((".loc", ".file", ".section", ".pragma"))


class _Place:
    """Kernel, line and source line of a position; asked in order."""

    def __init__(self, text: str, blank: str) -> None:
        self.starts = [m.end() for m in re.finditer(r"\n", text)]
        self.functions = [
            (m.start(), m[1])
            for m in re.finditer(r"\.(?:entry|func)\s+(?:\([^)]*\)\s*)?([$\w]+)", blank)
        ]
        self.files = {int(m[1]): m[2] for m in re.finditer(r"\.file\s+(\d+)\s+\"([^\"]+)\"", text)}
        self.locations = [
            (m.start(), int(m[1]), int(m[2]))
            for m in re.finditer(r"\.loc\s+(\d+)\s+(\d+)\s+\d+", blank)
        ]
        self.registers = [
            (m.start(), m[2], int(m[1]))
            for m in re.finditer(r"\.reg\s+\.[busf](\d+)\s+([^;]+);", blank)
        ]

    def line(self, at: int) -> int:
        return bisect.bisect_right(self.starts, at) + 1

    def kernel(self, at: int) -> str:
        name = "?"
        for start, found in self.functions:
            if start > at:
                break
            name = found
        return name

    def source(self, at: int) -> tuple[str | None, int | None]:
        place = bisect.bisect_right(self.locations, (at, 1 << 62, 0)) - 1
        if place < 0:
            return None, None
        start, file, line = self.locations[place]
        if any(start < function <= at for function, _ in self.functions):
            return None, None
        return self.files.get(file), line

    def width(self, at: int, register: str) -> int | None:
        """Bits of a register by the nearest declaration before; None for no register."""
        for start, names, bits in reversed(self.registers):
            if start < at and re.search(_declares(register), names):
                return bits
        return None


def _declares(register: str) -> str:
    """A pattern for the declaration of a register, alone or as part of ``%r<10>``."""
    stem = re.sub(r"\d+$", "", register)
    return rf"(?:^|[\s,])(?:{re.escape(register)}(?=[\s,]|$)|{re.escape(stem)}<\d+>)"


def _trace(match: re.Match[str], pc: int, where: _Place, at: int) -> list[tuple[str, Site]]:
    parts = match["op"].split(".")
    base = "cp.async" if match["op"].startswith("cp.async") else parts[0]
    if base == "cp.async":
        return _copy(match, parts, pc, where, at)
    space = next((s for s in ("global", "shared") if _names(parts, s)), None)
    if space is None:
        if any(part in ("param", "local", "const") or part.startswith(("param::", "local"))
               for part in parts):  # fmt: skip
            return []
        space = "generic"
    size = _size(parts, base)
    kind = "atomic" if base in ("atom", "red") else "store" if base.startswith("st") else "load"
    address = _ADDRESS.search(match["rest"])
    if address is None:
        return []
    return [_call(match, address, space, kind, size, pc, where, at)]


def _names(parts: list[str], space: str) -> bool:
    return any(part == space or part.startswith(f"{space}::") for part in parts)


def _copy(
    match: re.Match[str], parts: list[str], pc: int, where: _Place, at: int
) -> list[tuple[str, Site]]:
    """``cp.async`` reads global memory and writes shared memory."""
    if "shared" not in match["op"] or "bulk" in parts:
        return []
    addresses = list(_ADDRESS.finditer(match["rest"]))
    if len(addresses) < 2:
        return []
    found = re.search(r"\]\s*,\s*(\d+)", match["rest"][addresses[1].start() :])
    size = int(found[1]) if found else None
    return [
        _call(match, addresses[1], "global", "load", size, pc, where, at),
        _call(match, addresses[0], "shared", "store", size, pc + 1, where, at),
    ]


def _size(parts: list[str], base: str) -> int | None:
    if base in ("ldmatrix", "stmatrix"):
        return 16
    width = next((m for part in reversed(parts) if (m := _TYPE.fullmatch(part))), None)
    if width is None:
        return None
    vector = next((int(p[1:]) for p in parts if re.fullmatch(r"v[248]", p)), 1)
    return _BYTES[width[1]] * vector


def _call(
    match: re.Match[str], address: re.Match[str], space: str, kind: str, size: int | None, pc: int,
    where: _Place, at: int,
) -> tuple[str, Site]:  # fmt: skip
    guard = (match["guard"] or "").strip()
    name, offset = address[1], address[2]
    width = where.width(at, name)
    lines = ["{", ".reg .b64 %mmctl_a;"]
    if width == 32:
        lines.append(f"cvt.u64.u32 %mmctl_a, {name};")
    else:
        lines.append(f"mov.u64 %mmctl_a, {name};")
    if offset:
        lines.append(f"add.s64 %mmctl_a, %mmctl_a, {offset};")
    flags = (kind != "load") | (kind == "atomic") << 1 | SPACES.index(space) << 2 | (size or 0) << 8
    lines += [
        ".param .b64 mmctl_0;", "st.param.b64 [mmctl_0], %mmctl_a;",
        ".param .b32 mmctl_1;", f"st.param.b32 [mmctl_1], {pc};",
        ".param .b32 mmctl_2;", f"st.param.b32 [mmctl_2], {flags};",
        f"{guard} call mmctl_trace, (mmctl_0, mmctl_1, mmctl_2);".strip(), "}",
    ]  # fmt: skip
    file, line = where.source(at)
    site = Site(
        pc=pc, kernel=where.kernel(at), line=where.line(at), source_file=file, source_line=line,
        instruction=" ".join(match[0].split()), space=space, kind=kind, size_bytes=size,
        predicate=guard.lstrip("@") or None,
    )  # fmt: skip
    return " ".join(lines) + "\n\t", site
