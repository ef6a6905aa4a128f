"""Runs the PTX that nvcc emits for the test kernels, thread by thread, on the CPU.

Enough of the language for those kernels and their instrumentation: integers, single floats,
predicates, branches, calls, shuffles, barriers, atomics, vectors. Registers hold raw bits. It
keeps a record of its own of every access to global and shared memory outside ``mmctl_trace``,
made from the machine's state and not from anything that instrumentation added.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

GLOBAL_BASE = 0x7F0000000000
WARP = 32


@dataclass
class Instruction:
    guard: str | None
    negated: bool
    op: list[str]
    operands: list[str]


@dataclass
class Function:
    params: list[tuple[str, int]]
    code: list[Instruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)
    shared: dict[str, int] = field(default_factory=dict)
    shared_bytes: int = 0


@dataclass
class Module:
    functions: dict[str, Function]
    symbols: dict[str, int]
    initial: bytes


def parse(text: str) -> Module:
    text = re.sub(r"//[^\n]*|/\*.*?\*/", "", text, flags=re.DOTALL)
    text = re.sub(r"^\s*\.(loc|file|version|target|address_size)[^\n]*$", "", text, flags=re.M)
    symbols, initial = {}, bytearray()
    for m in re.finditer(r"\.global\s+\.align\s+(\d+)\s+\.[bu](\d+)\s+(\w+)(?:\[(\d+)\])?"
                         r"(?:\s*=\s*(\d+))?;", text):  # fmt: skip
        size = int(m[2]) // 8
        initial += bytes(-len(initial) % int(m[1]))
        symbols[m[3]] = GLOBAL_BASE + len(initial)
        initial += int(m[5] or 0).to_bytes(size, "little") * int(m[4] or 1)
    functions = {}
    for m in re.finditer(r"\.(?:entry|func)\s+(\w+)\s*\(([^)]*)\)[^{;]*\{", text):
        params = [(name, int(bits) // 8)
                  for bits, name in re.findall(r"\.param\s+\.[bu](\d+)\s+(\w+)", m[2])]  # fmt: skip
        functions[m[1]] = _body(Function(params), text, m.end())
    return Module(functions, symbols, bytes(initial))


def _body(function: Function, text: str, at: int) -> Function:
    depth, statement = 1, ""
    while depth:
        c = text[at]
        at += 1
        if c == "{" and not statement.strip():
            depth += 1
        elif c == "}" and not statement.strip():
            depth -= 1
        elif c == ";":
            _statement(function, statement.strip())
            statement = ""
        elif c == ":" and re.fullmatch(r"\s*[$\w]+", statement) and text[at] != ":":
            function.labels[statement.strip()] = len(function.code)
            statement = ""
        else:
            statement += c
    return function


def _statement(function: Function, text: str) -> None:
    if text.startswith(".shared"):
        m = re.match(r"\.shared\s+\.align\s+(\d+)\s+\.b8\s+(\w+)\[(\d+)\]", text)
        assert m, text
        function.shared_bytes += -function.shared_bytes % int(m[1])
        function.shared[m[2]] = function.shared_bytes
        function.shared_bytes += int(m[3])
        return
    if text.startswith("."):
        return
    m = re.match(r"(?:@(!?)(%\w+)\s+)?([a-z0-9_.:]+)\s*(.*)", text, re.DOTALL)
    assert m, text
    operands = re.findall(r"\{[^}]*\}|\[[^\]]*\]|\([^)]*\)|[^,\s][^,]*", m[4])
    function.code.append(
        Instruction(m[2], m[1] == "!", m[3].split("."), [o.strip() for o in operands])
    )


@dataclass
class Thread:
    tid: tuple[int, int, int]
    ctaid: tuple[int, int, int]
    number: int
    lane: int
    registers: dict[str, int] = field(default_factory=dict)


Access = tuple[int, str, str, int, int]  # token, space, kind, size, address


class Machine:
    """Global memory and one module; ``log`` holds the accesses that the machine itself saw."""

    def __init__(self, text: str, size: int = 1 << 16) -> None:
        self.module = parse(text)
        self.memory = bytearray(self.module.initial + bytes(size))
        self.next = len(self.module.initial)
        self.log: list[Access] = []
        self.shared = bytearray()

    def allocate(self, content: bytes) -> int:
        self.next += -self.next % 256
        at = self.next
        self.memory[at : at + len(content)] = content
        self.next += len(content)
        return GLOBAL_BASE + at

    def read(self, address: int, size: int) -> bytes:
        at = address - GLOBAL_BASE
        assert 0 <= at <= len(self.memory) - size, hex(address)
        return bytes(self.memory[at : at + size])

    def set(self, name: str, value: int) -> None:
        at = self.module.symbols[name] - GLOBAL_BASE
        self.memory[at : at + 8] = value.to_bytes(8, "little")

    def get(self, name: str) -> int:
        return int.from_bytes(self.read(self.module.symbols[name], 8), "little")

    def launch(self, kernel: str, grid: tuple[int, int, int], block: tuple[int, int, int],
               *arguments: int) -> None:  # fmt: skip
        function = self.module.functions[kernel]
        self.grid, self.block = grid, block
        params = {n: v for (n, _), v in zip(function.params, arguments, strict=True)}
        per_block = block[0] * block[1] * block[2]
        number = 0
        for z in range(grid[2]):
            for y in range(grid[1]):
                for x in range(grid[0]):
                    self.shared = bytearray(function.shared_bytes)
                    threads = []
                    for t in range(per_block):
                        tid = (t % block[0], t // block[0] % block[1], t // block[0] // block[1])
                        threads.append(Thread(tid, (x, y, z), number + t, t % WARP))
                    self._run_block(function, threads, params)
                    number += per_block

    def _run_block(self, function: Function, threads: list[Thread], params: Any) -> None:
        running = {t.number: (t, self._run(function, t, params)) for t in threads}
        waiting: dict[int, Any] = {}
        answers: dict[int, Any] = {}
        while running:
            for number, (_, execution) in list(running.items()):
                if number in waiting:
                    continue
                try:
                    waiting[number] = execution.send(answers.pop(number, None))
                except StopIteration:
                    del running[number]
            barrier = [n for n, request in waiting.items() if request[0] == "bar"]
            if running and len(barrier) == len(running):
                waiting.clear()
                continue
            self._shuffle(running, waiting, answers)

    def _shuffle(self, running: Any, waiting: Any, answers: Any) -> None:
        """Exchange values in every warp of which all living threads have come to a shuffle."""
        for warp in {number // WARP for number in running}:
            lanes = [n for n in running if n // WARP == warp]
            if all(n in waiting and waiting[n][0] == "shfl" for n in lanes):
                values = {n % WARP: waiting[n][1] for n in lanes}
                for n in lanes:
                    answers[n] = values.get((n % WARP) ^ waiting[n][2], waiting[n][1])
                for n in lanes:
                    del waiting[n]

    def _run(self, function: Function, thread: Thread, params: Any) -> Iterator[Any]:
        at = 0
        out: dict[str, int] = {}
        registers = thread.registers
        traced = function is self.module.functions.get("mmctl_trace")
        while at < len(function.code):
            i = function.code[at]
            at += 1
            if i.guard is not None and bool(registers[i.guard]) == i.negated:
                continue
            op, o = i.op, i.operands
            if op[0] == "bra":
                at = function.labels[o[-1]]
            elif op[0] == "ret":
                return
            elif op[0] == "bar":
                yield ("bar",)
            elif op[0] == "shfl":
                value = self.value(o[1], thread, function)
                answer = yield ("shfl", value, self.value(o[2], thread, function))
                registers[o[0].split("|")[0]] = answer
            elif op[0] == "call":
                callee = self.module.functions[o[0]]
                names = o[1].strip("()").split(",")
                given = {n: out[a.strip()] for (n, _), a in zip(callee.params, names, strict=True)}
                frame = Thread(thread.tid, thread.ctaid, thread.number, thread.lane)
                yield from self._run(callee, frame, given)
            elif op[0] in ("ld", "st", "atom", "red"):
                self._memory(op, o, thread, function, params, out, traced)
            else:
                registers[o[0]] = self._compute(op, o, thread, function)

    def value(self, text: str, thread: Thread, function: Function) -> int:
        if text in thread.registers:
            return thread.registers[text]
        if m := re.fullmatch(r"%(n?)(tid|ctaid)\.([xyz])", text):
            axis = "xyz".index(m[3])
            if m[1]:
                return self.block[axis] if m[2] == "tid" else self.grid[axis]
            return thread.tid[axis] if m[2] == "tid" else thread.ctaid[axis]
        if text.startswith("0f"):
            return int(text[2:], 16)
        if text in function.shared:
            return function.shared[text]
        if text in self.module.symbols:
            return self.module.symbols[text]
        return int(text, 0)

    def _address(self, text: str, thread: Thread, function: Function) -> int:
        m = re.fullmatch(r"\[\s*([^+\s]+)\s*(?:\+\s*(-?\d+))?\s*\]", text)
        assert m, text
        return self.value(m[1], thread, function) + int(m[2] or 0)

    def _memory(self, op: list[str], o: list[str], thread: Thread, function: Function,
                params: Any, out: dict[str, int], traced: bool) -> None:  # fmt: skip
        width = int(re.sub(r"\D", "", op[-1])) // 8
        target, place = (o[1], o[0]) if op[0] in ("st", "red") else (o[0], o[1])
        if "param" in op:
            name = re.sub(r"[\[\]\s]", "", place)
            if op[0] == "ld":
                thread.registers[target] = params[name]
            else:
                out[name] = self.value(target, thread, function)
            return
        address = self._address(place, thread, function)
        names = [n.strip() for n in target.strip("{}").split(",")]
        shared = "shared" in op
        kind = {"ld": "load", "st": "store"}.get(op[0], "atomic")
        if not traced:
            token = thread.number
            self.log.append(
                (token, "shared" if shared else "global", kind, width * len(names), address)
            )
        memory, at = (self.shared, address) if shared else (self.memory, address - GLOBAL_BASE)
        assert 0 <= at <= len(memory) - width * len(names), (op, hex(address))
        for index, name in enumerate(names):
            part = slice(at + index * width, at + (index + 1) * width)
            old = int.from_bytes(memory[part], "little")
            if op[0] in ("ld", "atom"):
                thread.registers[name] = old
            if op[0] == "st":
                memory[part] = _low(self.value(name, thread, function), width)
            elif op[0] == "atom":
                given = [self.value(x, thread, function) for x in o[2:]]
                new = self._atomic(op, old, given, width)
                memory[part] = _low(new, width)

    def _atomic(self, op: list[str], old: int, given: list[int], width: int) -> int:
        if "cas" in op:
            return given[1] if old == given[0] else old
        assert "add" in op, op
        if op[-1] == "f32":
            return _bits(_float(old) + _float(given[0]))
        return old + given[0]

    def _compute(self, op: list[str], o: list[str], thread: Thread, function: Function) -> int:
        kind = op[-1]
        raw = [self.value(x, thread, function) for x in o[1:]]
        name = op[0]
        if name in ("mov", "cvta"):
            return raw[0]
        if name == "cvt":
            return _integer(raw[0], op[-1]) & _mask(op[-2])
        if name == "setp":
            a, b = (_number(x, kind) for x in raw)
            compare = op[1]
            return int({"lt": a < b, "le": a <= b, "gt": a > b, "ge": a >= b, "eq": a == b,
                        "ne": a != b}[compare])  # fmt: skip
        if name == "selp":
            return raw[0] if raw[2] else raw[1]
        if kind == "pred":
            return {"or": raw[0] | raw[-1], "and": raw[0] & raw[-1], "not": 1 - raw[0]}[name]
        if kind == "f32":
            return _bits(_float_operation(name, [_float(x) for x in raw]))
        wide = "wide" in op
        values = [_integer(x, kind) for x in raw]
        if name == "mad" and wide:
            values[2] = _integer(raw[2], kind[0] + "64")
        result = _integer_operation(name, values, kind, raw)
        return result & (_mask(kind[0] + "64") if wide else _mask(kind))


def _float_operation(name: str, v: list[float]) -> float:
    if name == "ex2":
        return 2.0 ** v[0] if v[0] > -1000 else 0.0
    if name == "max":
        return max(v)
    return {"add": lambda: v[0] + v[1], "sub": lambda: v[0] - v[1], "mul": lambda: v[0] * v[1],
            "fma": lambda: v[0] * v[1] + v[2], "div": lambda: v[0] / v[1],
            "neg": lambda: -v[0]}[name]()  # fmt: skip


def _integer_operation(name: str, v: list[int], kind: str, raw: list[int]) -> int:
    bits = int(kind[1:])
    return {
        "add": lambda: v[0] + v[1], "sub": lambda: v[0] - v[1], "mul": lambda: v[0] * v[1],
        "mad": lambda: v[0] * v[1] + v[2], "and": lambda: v[0] & v[1], "or": lambda: v[0] | v[1],
        "xor": lambda: v[0] ^ v[1], "not": lambda: ~v[0], "neg": lambda: -v[0],
        "max": lambda: max(v[0], v[1]), "min": lambda: min(v[0], v[1]),
        "shl": lambda: v[0] << raw[1] if raw[1] < bits else 0, "shr": lambda: v[0] >> raw[1],
        "div": lambda: v[0] // v[1], "rem": lambda: v[0] % v[1],
    }[name]()  # fmt: skip


def _mask(kind: str) -> int:
    return (1 << int(re.sub(r"\D", "", kind))) - 1


def _integer(raw: int, kind: str) -> int:
    value = raw & _mask(kind)
    if kind[0] == "s" and value >> (int(kind[1:]) - 1):
        value -= 1 << int(kind[1:])
    return value


def _number(raw: int, kind: str) -> float:
    return _float(raw) if kind == "f32" else _integer(raw, kind)


def _float(raw: int) -> float:
    value: float = struct.unpack("<f", struct.pack("<I", raw & 0xFFFFFFFF))[0]
    return value


def _bits(value: float) -> int:
    bits: int = struct.unpack("<I", struct.pack("<f", value))[0]
    return bits


def _low(value: int, width: int) -> bytes:
    return (value & ((1 << 8 * width) - 1)).to_bytes(width, "little")
