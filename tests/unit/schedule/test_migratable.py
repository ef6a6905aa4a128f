"""Migratability: the published example, compute capabilities, fat binaries made by hand."""

from __future__ import annotations

import json
import struct
import sys
import zipfile
from pathlib import Path

import pytest

from mmctl.engine.errors import MmctlError
from mmctl.engine.schedule import code_objects, migratable
from mmctl.engine.schedule.migratable import Needs, Place

MIB = 1 << 20


def fatbin(*entries: tuple[int, int]) -> bytes:
    """A fat binary of (kind, sm) entries, 1 is PTX and 2 a cubin."""
    body = b""
    for kind, sm in entries:
        head = struct.pack("<HHIQIIHHI", kind, 0x101, 64, 32, 0, 0, 0, 1, sm)
        body += head.ljust(64, b"\0") + b"\1" * 32
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(body)) + body


def test_x86_with_avx512_does_not_move_to_arm_and_every_reason_is_given() -> None:
    x86 = Place(
        name="x86", kind="cpu", isa="x86_64", cpu_features=("avx512f", "sse2"),
        image_alignment_bytes=2 * MIB, base_address=0xFFFF_C900_0000_0000,
    )  # fmt: skip
    arm = Place(
        name="arm", kind="cpu", isa="aarch64", cpu_features=("asimd", "sve"),
        image_alignment_bytes=2 * MIB, base_address=0xFFFF_8000_0800_0000,
    )  # fmt: skip
    verdict, reasons = migratable.check(x86, arm, Needs())
    assert verdict == "not_migratable"
    blocked = {reason.check for reason in reasons if reason.verdict == "blocks"}
    assert blocked == {"instruction set", "cpu features", "address range"}
    assert migratable.check(x86, x86, Needs())[0] == "migratable"


@pytest.mark.parametrize(
    ("entries", "sm", "verdict"),
    [
        (((2, 80),), 89, "allows"),  # a cubin runs on later chips of its generation
        (((2, 80),), 90, "blocks"),  # and on no other
        (((2, 90),), 80, "blocks"),
        (((2, 89),), 80, "blocks"),  # never on an earlier one
        (((2, 80), (1, 80)), 120, "allows"),  # PTX is compiled for any later one
        (((1, 90),), 89, "blocks"),
    ],
)
def test_code_objects_against_compute_capability(
    tmp_path: Path, entries: tuple[tuple[int, int], ...], sm: int, verdict: str
) -> None:
    binary = tmp_path / "lib.so"
    binary.write_bytes(b"noise" * 7 + fatbin(*entries) + b"tail")
    code = code_objects.read(binary)
    assert sum(code.values()) == len(entries)
    there = Place(name="there", kind="gpu", isa="cuda", sm=sm)
    _, reasons = migratable.check(there, there, Needs(code=code))
    assert reasons[0].verdict == verdict


def test_wheels_and_broken_files(tmp_path: Path) -> None:
    wheel = tmp_path / "x.whl"
    with zipfile.ZipFile(wheel, "w") as file:
        file.writestr("x/lib.so", fatbin((2, 90), (2, 90), (1, 75)))
        file.writestr("x/readme.txt", fatbin((2, 50)))
    found = {(code.kind, code.sm): count for code, count in code_objects.read(wheel).items()}
    assert found == {("cubin", 90): 2, ("ptx", 75): 1}
    cut = tmp_path / "cut.so"
    cut.write_bytes(fatbin((2, 90))[:30])
    with pytest.raises(MmctlError, match="holds no code"):
        code_objects.read(cut)


def test_this_machine_moves_to_itself() -> None:
    here = migratable.here()
    verdict, reasons = migratable.check(here, here, Needs(memory_bytes=1))
    assert verdict == "migratable" and all(r.verdict != "blocks" for r in reasons)
    code = code_objects.read(Path(sys.executable).resolve())
    assert [c.target for c in code if c.kind == "host"] == [here.isa]


def test_pages_types_and_memory() -> None:
    small = Place(name="a", kind="cpu", isa="x86_64", page_bytes=4096, dtypes=("float32",))
    large = Place(
        name="b", kind="cpu", isa="x86_64", page_bytes=65536, dtypes=("float32",),
        memory_bytes=10,
    )  # fmt: skip
    _, reasons = migratable.check(small, large, Needs(dtypes=("bfloat16",), memory_bytes=11))
    blocked = {reason.check for reason in reasons if reason.verdict == "blocks"}
    assert blocked == {"page size", "data types", "memory"}
    _, back = migratable.check(large, small, Needs())
    assert {r.check: r.verdict for r in back}["page size"] == "allows"


def test_a_measured_device_is_a_place(tmp_path: Path) -> None:
    row = {"device": "gpu0", "precision": "bf16", "flops_per_s": 1e14, "memory_bytes": 1 << 34,
           "bandwidth_bytes_per_s": 1e12}  # fmt: skip
    path = tmp_path / "mine.json"
    other = Place(name="Other", kind="gpu", memory_bytes=1 << 34)
    for name, found in (("NVIDIA L40S", migratable.place("l40s")), ("Other", other)):
        document = {"schema": 1, "benchmark": "device", "devices": [{**row, "name": name}]}
        path.write_text(json.dumps(document))
        assert migratable.place(str(path)) == found
