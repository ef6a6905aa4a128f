"""``mmctl fingerprint trace | compare | matrix``: contracts, exit codes, pipes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

LOOP = '{{"type":"access","ts_ns":{t},"address":{a},"size_bytes":64,"kind":"load"}}\n'


@pytest.fixture
def loops(tmp_path: Path) -> list[str]:
    """Two tasks that fit a 64-KiB cache alone and not together, and a small third."""
    paths = []
    for name, count in (("a", 600), ("b", 700), ("c", 10)):
        path = tmp_path / f"{name}.ndjson"
        path.write_text("".join(LOOP.format(t=i, a=64 * (i % count)) for i in range(2 * count)))
        paths.append(str(path))
    return paths


def test_compare_has_both_answers(mmctl, loops: list[str]) -> None:
    done = mmctl("fingerprint", "compare", *loops[:2], "--cache", "64KiB", "-o", "json")
    assert done.returncode == 3, done.stderr
    found = json.loads(done.stdout)
    assert {"distance", "band", "action", "predicted_extra_misses_ratio", "baseline_ratio"} <= set(
        found
    )
    assert found["schema"] == 1 and found["basis"] == "modelled"
    assert found["predicted_extra_misses_ratio"] > 0.5 and found["baseline_ratio"] > 0.9
    fine = mmctl("fingerprint", "compare", loops[0], loops[2], "--cache", "64KiB")
    assert fine.returncode == 0 and "pattern similarity" in fine.stdout


def test_matrix_of_files_and_of_fingerprints_is_one(
    mmctl, loops: list[str], tmp_path: Path
) -> None:
    made = mmctl("fingerprint", *loops, "-o", "ndjson")
    assert made.returncode == 0, made.stderr
    (tmp_path / "tasks.ndjson").write_text(made.stdout)
    direct = mmctl("fingerprint", "matrix", *loops, "--cache", "64KiB", "-o", "json")
    stored = mmctl("fingerprint", "matrix", str(tmp_path / "tasks.ndjson"), "--cache", "64KiB",
                   "-o", "json")  # fmt: skip
    assert direct.returncode == stored.returncode == 3
    assert json.loads(direct.stdout) == json.loads(stored.stdout)
    record = tmp_path / "pairs.ndjson"
    table = mmctl(
        "fingerprint", "matrix", *loops, "--cache", "64KiB", "--record", str(record)
    ).stdout
    shown = mmctl("top", str(record), "--once", "--screen", "traces", "-o", "text").stdout
    assert "a.ndjson and b.ndjson" in shown and "modelled" in shown
    assert "a.ndjson and b.ndjson" in table and "\033" not in table


def test_both_algorithms_and_the_pipe(mmctl, loops: list[str]) -> None:
    for algorithm in ("classic", "locality"):
        done = mmctl("fingerprint", "trace", loops[0], "--algorithm", algorithm, "-o", "json")
        (task,) = json.loads(done.stdout)["tasks"]
        assert task["algorithm"] == algorithm and len(task["fingerprint"]) == 16
    piped = mmctl("fingerprint", "trace", "-", "-o", "csv", input=Path(loops[0]).read_text())
    assert piped.stdout.splitlines()[0].startswith("name,algorithm,fingerprint")


def test_a_module_is_traced_and_recorded(mmctl, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    work = tmp_path / "work.py"
    work.write_text("import torch\ndef step():\n    torch.zeros(64, 64) @ torch.zeros(64, 64)\n")
    record = tmp_path / "r.ndjson"
    done = mmctl("fingerprint", "trace", "--module", f"{work}:step", "--record", str(record),
                 "-o", "json")  # fmt: skip
    assert done.returncode == 0, done.stderr
    (task,) = json.loads(done.stdout)["tasks"]
    again = mmctl("fingerprint", "trace", str(record), "-o", "json")
    assert json.loads(again.stdout)["tasks"][0]["fingerprint"] == task["fingerprint"]


def test_mistakes(mmctl, loops: list[str]) -> None:
    for arguments, code, words in [
        (["trace"], 2, "nothing to fingerprint"),
        (["trace", loops[0], "--algorithm", "md5"], 2, "no algorithm"),
        (["compare", *loops[:2], "--cache", "h1000"], 2, "no memory model"),
        (["matrix", loops[0]], 2, "two tasks"),
        (["trace", "--module", "x.py"], 2, "file.py:function"),
    ]:
        done = mmctl("fingerprint", *arguments)
        assert done.returncode == code and words in done.stderr, (arguments, done.stderr)
        assert done.stderr.count("\n") == 1


def test_contention_of_records_and_of_a_module(mmctl, tmp_path: Path) -> None:
    line = '{{"type":"access","ts_ns":{t},"address":{a},"size_bytes":4,"kind":"{k}",' \
           '"head":{h},"layer":{l},"stream":"{s}"}}\n'  # fmt: skip
    text = "".join(
        line.format(t=320 * i, a=4096 + 64 * (i % 8), k="load", h=0, l=0, s="vision")
        + line.format(t=320 * i + 1, a=4096 + 64 * (i % 8), k="load", h=1, l=0, s="text")
        for i in range(60)
    )
    path = tmp_path / "heads.ndjson"
    path.write_text(text)
    done = mmctl("fingerprint", "contention", str(path), "-o", "json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert {"bwi_cycles_ratio", "bwi_windows_ratio", "independent_ratio", "excess_ratio"} <= set(
        found
    )
    assert found["bwi_windows_ratio"] == 1.0 and found["bwi_cycles_ratio"] == 0.0
    (pair,) = found["pairs"]
    assert pair["mode"] == "same_layer" and {h["stream"] for h in pair["heads"]} == {
        "vision", "text",
    }  # fmt: skip
    coarse = mmctl("fingerprint", "contention", str(path), "--cycle", "2ns", "-o", "json")
    assert json.loads(coarse.stdout)["bwi_cycles_ratio"] == 1.0
    assert mmctl("fingerprint", "contention").returncode == 2


def test_contention_of_an_attention_module(mmctl, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    work = tmp_path / "work.py"
    work.write_text(
        "import torch\n"
        "def prefill():\n"
        "    q = torch.zeros(1, 4, 96, 64)\n"
        "    k = v = torch.zeros(1, 2, 96, 64)\n"
        "    for _ in range(2):\n"
        "        torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)\n"
    )
    done = mmctl("fingerprint", "contention", "--module", f"{work}:prefill", "-o", "json")
    found = json.loads(done.stdout)
    assert done.returncode == 0 and found["basis"] == "modelled" and found["heads"] == 8
    shared = {tuple(h["head"] for h in p["heads"]) for p in found["pairs"] if p["shared_lines"]}
    assert (0, 1) in shared and (2, 3) in shared  # groups of two share keys and values


def test_streams_of_two_files_and_of_one(mmctl, loops: list[str], tmp_path: Path) -> None:
    done = mmctl("fingerprint", "streams", *loops[:2], "--device", "64KiB/4", "-o", "json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["basis"] == "modelled" and found["model"]["l2_bytes"] == 65536
    assert [case["schedule"] for case in found["cases"]] == [
        "run_to_completion", "one_mixed_stream", "two_streams", "two_streams_disjoint",
    ]  # fmt: skip
    for case in found["cases"]:
        assert {"l2_miss_ratio", "row_conflict_ratio", "streams"} <= set(case)
        assert len(case["streams"]) == 2
    lines = [line.replace('"kind"', f'"stream":"{name}","kind"')
             for name, path in zip("vt", loops, strict=False)
             for line in Path(path).read_text().splitlines(True)]  # fmt: skip
    (tmp_path / "both.ndjson").write_text("".join(lines))
    one = mmctl("fingerprint", "streams", str(tmp_path / "both.ndjson"), "--device", "64KiB/4")
    assert one.returncode == 0 and "both.ndjson:v" in one.stdout
    assert mmctl("fingerprint", "streams", loops[0]).returncode == 2


PTX = """.version 8.0
.target sm_80
.address_size 64
.visible .entry copy(.param .u64 a)
{
	.reg .b32 %r<3>;
	.reg .b64 %rd<3>;
	ld.param.u64 %rd1, [a];
	ld.global.u32 %r1, [%rd1];
	st.global.u32 [%rd1+4], %r1;
	ret;
}
"""


def test_instrument_and_paths(mmctl, tmp_path: Path) -> None:
    import struct

    source, out, sites = tmp_path / "k.ptx", tmp_path / "o.ptx", tmp_path / "s.json"
    source.write_text(PTX)
    done = mmctl("fingerprint", "instrument", str(source), "--out", str(out), "--sites", str(sites),
                 "-o", "json")  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert [s["kind"] for s in json.loads(done.stdout)["sites"]] == ["load", "store"]
    assert out.read_text().count("call mmctl_trace") == 2
    again = mmctl("fingerprint", "instrument", str(out), "--out", str(tmp_path / "x.ptx"))
    assert again.returncode == 1 and "instrumented already" in again.stderr
    assert not (tmp_path / "x.ptx").exists()

    ring = tmp_path / "ring"
    ring.write_bytes(struct.pack("<QIIQQIIQ", 3, 0, 4 << 8, 0x1000, 3, 1, 4 << 8 | 1, 0x1004))
    memory = tmp_path / "m.json"
    memory.write_text('[{"device_ptr": 4096, "num_bytes": 64, "name": "hidden"}]')
    shown = mmctl("fingerprint", "paths", str(ring), "--sites", str(sites), "--memory", str(memory),
                  "-o", "json")  # fmt: skip
    assert shown.returncode == 0, shown.stderr
    (path,) = json.loads(shown.stdout)["paths"]
    assert path["token_id"] == 3 and path["regions"] == ["hidden"]
    assert path["steps"][1]["instruction"] == "st.global.u32 [%rd1+4], %r1;"
    table = mmctl("fingerprint", "paths", str(ring), "--token", "3")
    assert "0x1004" in table.stdout
    assert mmctl("fingerprint", "paths", str(ring), "--token", "4").returncode == 2
