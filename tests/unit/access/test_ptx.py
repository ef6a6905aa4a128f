"""Instrumented kernels against an interpreter: same results, and the records are right."""

from __future__ import annotations

import re
import shutil
import struct
import subprocess
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from ptx_interpreter import GLOBAL_BASE, Machine

from mmctl.engine.access import ptx
from mmctl.engine.errors import MmctlError

FIXTURES = Path(__file__).parents[2] / "fixtures" / "ptx"
PLAIN = (FIXTURES / "kernels.ptx").read_text()
MADE = ptx.instrument(PLAIN)
RNG = np.random.default_rng(0)


def floats(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


def reduction(machine: Machine) -> np.ndarray:
    values = np.arange(150, dtype=np.float32)
    out = machine.allocate(bytes(4))
    machine.launch("reduction", (2, 1, 1), (64, 1, 1), machine.allocate(values.tobytes()), out, 150)
    found = np.frombuffer(machine.read(out, 4), np.float32)
    assert found[0] == values.sum()
    return found


SOFTMAX = floats(2, 40)


def softmax(machine: Machine) -> np.ndarray:
    out = machine.allocate(bytes(SOFTMAX.nbytes))
    machine.launch("softmax", (2, 1, 1), (32, 1, 1), machine.allocate(SOFTMAX.tobytes()), out, 40)
    found = np.frombuffer(machine.read(out, SOFTMAX.nbytes), np.float32).reshape(2, 40)
    wanted = np.exp(SOFTMAX - SOFTMAX.max(1, keepdims=True))
    np.testing.assert_allclose(found, wanted / wanted.sum(1, keepdims=True), rtol=1e-4)
    return found


A, B = floats(16, 16), floats(16, 16)


def matrix_product(machine: Machine) -> np.ndarray:
    out = machine.allocate(bytes(A.nbytes))
    a, b = machine.allocate(A.tobytes()), machine.allocate(B.tobytes())
    machine.launch("matrix_product", (1, 1, 1), (8, 8, 1), a, b, out, 16)  # its first tile
    found = np.frombuffer(machine.read(out, A.nbytes), np.float32).reshape(16, 16)
    np.testing.assert_allclose(found[:8, :8], (A @ B)[:8, :8], rtol=1e-3, atol=1e-5)
    return found


Q, K, V = floats(20, 4), floats(20, 4), floats(20, 4)


def attention(machine: Machine) -> np.ndarray:
    out = machine.allocate(bytes(Q.nbytes))
    q, k, v = (machine.allocate(x.tobytes()) for x in (Q, K, V))
    done = machine.allocate(bytes(4))
    machine.launch("attention", (2, 1, 1), (16, 1, 1), q, k, v, out, 20, done)
    found = np.frombuffer(machine.read(out, Q.nbytes), np.float32).reshape(20, 4)
    weights = np.exp(Q @ K.T)
    np.testing.assert_allclose(
        found, weights / weights.sum(1, keepdims=True) @ V, rtol=1e-3, atol=1e-5
    )
    return found


KERNELS = [reduction, softmax, matrix_product, attention]
SLOTS = 1 << 15


def traced(kernel, **settings: int) -> tuple[np.ndarray, np.ndarray, Machine]:
    """A kernel's result and records when it runs instrumented."""
    machine = Machine(MADE.text, 1 << 20)
    ring = machine.allocate(bytes(24 * SLOTS))
    for name, value in {"mmctl_ring": ring, "mmctl_slots": SLOTS, **settings}.items():
        machine.set(name, value)
    found = kernel(machine)
    count = machine.get("mmctl_count")
    kind = np.dtype([("token", "<u8"), ("pc", "<u4"), ("kind", "<u4"), ("address", "<u8")])
    return found, np.frombuffer(machine.read(ring, 24 * min(count, SLOTS)), kind), machine


def named(record: np.void) -> tuple[int, str, str, int, int]:
    kind = int(record["kind"])
    what = "atomic" if kind & 2 else "store" if kind & 1 else "load"
    space = ptx.SPACES[kind >> 2 & 3]
    return int(record["token"]), space, what, kind >> 8, int(record["address"])


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda k: k.__name__)
def test_same_results_and_every_access_recorded(kernel) -> None:
    plain = Machine(PLAIN, 1 << 20)
    expected = kernel(plain)
    found, records, machine = traced(kernel, mmctl_threads_per_token=1)
    assert found.tobytes() == expected.tobytes()
    assert len(records) == len(plain.log) == len(machine.log)
    # The two machines' buffers lie apart by what the instrumentation added to the module.
    shift = _shift(plain, machine)
    own = Counter((t, s, k, n, a + shift * (s == "global")) for t, s, k, n, a in plain.log)
    assert Counter(named(record) for record in records) == own
    for record in records:
        site = MADE.sites[int(record["pc"])]
        assert (site.kernel, site.space, site.kind) == (kernel.__name__, *named(record)[1:3])


def _shift(plain: Machine, machine: Machine) -> int:
    def first(log: list) -> int:
        return min(address for _, space, _, _, address in log if space == "global")

    return first(machine.log) - first(plain.log)


def test_tokens_by_warp_and_only_those_asked_for() -> None:
    _, records, _ = traced(reduction, mmctl_token_base=100)
    assert set(records["token"].tolist()) == {100, 101, 102, 103}
    _, some, _ = traced(reduction, mmctl_first_token=1, mmctl_token_count=2)
    assert set(some["token"].tolist()) == {1, 2}


def test_a_full_ring_goes_on_at_its_beginning_and_counts() -> None:
    found, records, machine = traced(reduction, mmctl_slots=64)
    assert machine.get("mmctl_count") > 64 and found[0] == sum(range(150))
    assert (records[64:]["token"] == 0).all() and (records[64:]["address"] == 0).all()


def test_without_a_ring_nothing_is_recorded() -> None:
    machine = Machine(MADE.text, 1 << 16)
    reduction(machine)
    assert machine.get("mmctl_count") == 0


def test_the_text_is_only_added_to() -> None:
    """Taking out what was put in gives the module back, comments and source lines included."""
    text = MADE.text.replace(ptx._RUNTIME, "")
    text = re.sub(r"\{ \.reg \.b64 %mmctl_a;.*?\}\n\t", "", text)
    assert text == PLAIN and PLAIN.count(".loc") > 50


def test_every_memory_instruction_is_a_site() -> None:
    count = len(re.findall(r"\b(?:ld|st|atom|red)\.(?:global|shared)", PLAIN))
    assert len(MADE.sites) == count and [s.pc for s in MADE.sites] == list(range(count))
    lines = PLAIN.splitlines()
    for site in MADE.sites:
        assert site.instruction.split()[-1] in lines[site.line - 1]
        assert site.source_line is not None
    assert {s.size_bytes for s in MADE.sites} == {4, 16}


HEADER = ".version 8.0\n.target sm_90\n.address_size 64\n.visible .entry k(.param .u64 p)\n{\n"


@pytest.mark.parametrize(
    ("instruction", "wanted"),
    [
        ("@%p1 ld.global.nc.v4.f32 {%f1, %f2, %f3, %f4}, [%rd1+16];", [("global", "load", 16)]),
        ("@!%p1 st.shared.u8 [%r1-4], %rs1;", [("shared", "store", 1)]),
        ("ld.volatile.shared::cta.b64 %rd2, [tile+8];", [("shared", "load", 8)]),
        ("red.relaxed.gpu.global.add.u32 [%rd1], %r1;", [("global", "atomic", 4)]),
        ("atom.shared.cas.b64 %rd2, [%r1], %rd3, %rd4;", [("shared", "atomic", 8)]),
        ("ld.u16 %rs1, [%rd1];", [("generic", "load", 2)]),
        ("ld.acquire.sys.global.b128 %rq1, [%rd1];", [("global", "load", 16)]),
        ("cp.async.cg.shared.global [%r1], [%rd1], 16;",
         [("global", "load", 16), ("shared", "store", 16)]),
        ("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r1, %r2, %r3, %r4}, [%r5];",
         [("shared", "load", 16)]),
        ("ld.global.v2.bf16x2 {%r1, %r2}, [%rd1];", [("global", "load", 8)]),
        ("ld.param.u64 %rd1, [p];", []),
        ("ld.local.u32 %r1, [%rd1];", []),
        ("ld.const.u32 %r1, [table];", []),
        ("// ld.global.u32 %r1, [%rd1];", []),
    ],
)  # fmt: skip
def test_forms_of_access(instruction: str, wanted: list[tuple[str, str, int]]) -> None:
    registers = ".reg .b32 %r<9>; .reg .b64 %rd<9>; .reg .pred %p<3>;\n"
    made = ptx.instrument(f"{HEADER}{registers}{instruction}\nret;\n}}\n")
    assert [(s.space, s.kind, s.size_bytes) for s in made.sites] == wanted
    for site in made.sites:
        guard = re.match(r"@!?%p1", instruction)
        assert site.predicate == (guard[0][1:] if guard else None)
        if guard:
            assert f"{guard[0]} call mmctl_trace" in made.text


def test_several_instructions_on_a_line_and_over_lines() -> None:
    body = ".reg .b64 %rd<9>; .reg .b32 %r<9>;\n{ ld.global.u32 %r1, [%rd1]; st.global.u32\n" \
           "  [%rd2],\n %r1; }\n$L1: ld.shared.u32 %r2, [%r1];\nret;\n}\n"  # fmt: skip
    made = ptx.instrument(HEADER + body)
    assert [s.kind for s in made.sites] == ["load", "store", "load"]


def test_what_is_left_out_is_said() -> None:
    made = ptx.instrument(HEADER + "cp.async.bulk.shared::cluster.global [%r1], [%rd1], 16;\n}\n")
    assert made.sites == [] and made.skipped == ["cp.async.bulk.shared::cluster.global"]


@pytest.mark.parametrize("text", ["", "hello", PLAIN.replace("_size 64", "_size 32"), MADE.text,
                                  PLAIN.replace(".version 9.0", ".version 3.2")])  # fmt: skip
def test_other_text_is_refused(text: str) -> None:
    with pytest.raises(MmctlError):
        ptx.instrument(text)


def test_ptxas_accepts_it(tmp_path: Path) -> None:
    ptxas = shutil.which("ptxas")
    if ptxas is None:
        pytest.skip("ptxas (CUDA toolkit) is not installed")
    known = subprocess.run([ptxas, "--help"], capture_output=True, text=True).stdout
    for target in ("sm_75", "sm_80", "sm_86", "sm_90", "sm_100"):
        if target not in known:
            continue
        path = tmp_path / f"{target}.ptx"
        path.write_text(MADE.text.replace(".target sm_75", f".target {target}"))
        done = subprocess.run(
            [ptxas, f"-arch={target}", str(path), "-o", str(tmp_path / "out")],
            capture_output=True, text=True,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr


def test_the_interpreter_reads_what_it_wrote() -> None:
    machine = Machine(PLAIN)
    at = machine.allocate(struct.pack("<2f", 1.5, 2.5))
    assert at >= GLOBAL_BASE and struct.unpack("<2f", machine.read(at, 8)) == (1.5, 2.5)
