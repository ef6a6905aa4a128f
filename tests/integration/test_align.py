"""Three sources on one clock, on this kernel: skipped where it forbids probing."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from mmctl.engine.access import align

STUB = """
int cudaLaunchKernel(const void *f) { return f != 0; }
int aclrtLaunchKernel(long id) { return (int)id; }
"""
PROGRAM = """
#define _GNU_SOURCE
#include <stdio.h>
#include <time.h>
int cudaLaunchKernel(const void *f);
int aclrtLaunchKernel(long id);
static long long now(void) {
  struct timespec t;
  clock_gettime(CLOCK_BOOTTIME, &t);
  return t.tv_sec * 1000000000LL + t.tv_nsec;
}
int main(int argc, char **argv) {
  static long long before[1000], after[1000];
  for (long i = 0; i < 1000; i++) {
    before[i] = now();
    cudaLaunchKernel((void *)i);
    after[i] = now();
    aclrtLaunchKernel(i);
    struct timespec rest = {0, 200000};
    nanosleep(&rest, 0);
  }
  FILE *file = fopen(argv[1], "w");
  for (int i = 0; i < 1000; i++) fprintf(file, "%lld %lld\\n", before[i], after[i]);
  return fclose(file);
}
"""


@pytest.fixture
def program(tmp_path: Path) -> tuple[Path, Path]:
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler for the stub library")
    if (reason := align.missing()) is not None:
        pytest.skip(f"cannot probe this kernel: {reason}")
    (tmp_path / "stub.c").write_text(STUB)
    (tmp_path / "program.c").write_text(PROGRAM)
    library, binary = tmp_path / "libstub.so", tmp_path / "program"
    subprocess.run([compiler, "-O1", "-shared", "-fPIC", "stub.c", "-o", library], cwd=tmp_path,
                   check=True)  # fmt: skip
    subprocess.run([compiler, "-O1", "program.c", "-o", binary, library, f"-Wl,-rpath,{tmp_path}"],
                   cwd=tmp_path, check=True)  # fmt: skip
    return library, binary


def test_a_thousand_launches_under_load(mmctl, program: tuple[Path, Path], tmp_path: Path) -> None:
    library, binary = program
    spin = [sys.executable, "-c", "while True: pass"]
    hogs = [subprocess.Popen(spin) for _ in range((os.cpu_count() or 1) + 1)]
    times = tmp_path / "times"
    try:
        probes = ["--launch", str(library), "--npu", str(library)]
        done = mmctl("probe", "align", *probes, "-o", "json", "--", str(binary), str(times))
    finally:
        for hog in hogs:
            hog.kill()
            hog.wait()
    if done.returncode == 4:
        pytest.skip(f"this kernel forbids probing: {done.stderr.strip()}")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["launches"], found["npu_ops"], found["lost"]) == (1000, 1000, 0)
    assert found["cost_per_event_ns"] > 0
    offset = align.boottime_offset_ns()
    launches = [r for r in found["records"] if r["kind"] == "kernel"]
    assert [r["op_id"] for r in launches] == list(range(1000))
    own = [tuple(map(int, line.split())) for line in times.read_text().splitlines()]
    for record, (before, after) in zip(launches, own, strict=True):
        assert before - 10_000 <= record["ts_ns"] - offset <= after + 10_000
    # Every launch waited for a processor after its program had slept.
    assert sum(r["sched_delay_ns"] > 0 for r in launches) > 900


def test_a_symbol_that_is_not_there(mmctl, program: tuple[Path, Path]) -> None:
    done = mmctl("probe", "align", "--launch", f"{program[0]}:cudaLunchKernel")
    assert done.returncode == 2 and "no symbol 'cudaLunchKernel'" in done.stderr


def test_mistakes_and_missing_privilege(mmctl, tmp_path: Path) -> None:
    assert mmctl("probe", "align").returncode in (2, 4)
    log = tmp_path / "log"
    log.write_text("K 5 7 7 0\nS 9 0 7 3\nK 12 7 7 0\n")
    done = mmctl("probe", "align", "--read", str(log), "-o", "ndjson")
    kinds = [json.loads(line)["kind"] for line in done.stdout.splitlines()]
    assert done.returncode == 0 and kinds == ["kernel", "scheduling", "kernel"]
    nowhere = {**os.environ, "PATH": str(tmp_path)}
    refused = mmctl("probe", "align", "--launch", "/x.so", env=nowhere)
    assert refused.returncode == 4 and "bpftrace is not installed" in refused.stderr
