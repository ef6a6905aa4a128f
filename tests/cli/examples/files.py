"""The files that examples name: each made by what makes it in life, or as its format says."""

from __future__ import annotations

import gzip
import json
import random
import re
import shutil
import sqlite3
import struct
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import msgspec
import pytest
import zstandard

from mmctl.benchmarks import zoo
from mmctl.benchmarks.recorder import MIB, Recorder, dump
from mmctl.benchmarks.timelines import write_trace
from mmctl.engine.access import accesses, paths, ptx, tasks
from mmctl.engine.memory.allocator import OutOfMemory
from mmctl.engine.recording import Writer, header, read
from mmctl.engine.records import Event, Fits, Pool, Span, encode
from mmctl.engine.sources.demo import SHIPPED

FIXTURES = Path(__file__).parents[2] / "fixtures"
START_NS = 1_700_000_000 * 10**9
Make = Callable[[Path], object]


def prepare(line: str, folder: Path) -> None:
    """Make in ``folder`` every file that ``line`` names to read."""
    written = "--out|--record|--journal|--results|--bundle|--heatmap|>"
    if "fingerprint instrument" in line:
        written += "|--sites"
    read = re.sub(rf"(?:{written}) \S+", "", line)
    for name, make in FILES.items():
        if re.search(rf"(?<![\w.*-]){re.escape(name)}(?![\w*.-])", read):
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            make(path)


def _copy(source: Path, path: Path) -> None:
    shutil.copyfile(source, path)


def _write(text: str, path: Path) -> None:
    path.write_text(text)


def _json(value: object, path: Path) -> None:
    path.write_text(json.dumps(value))


def _recording(path: Path) -> None:
    """The shipped recording up to the end of its first recovery, as of this file's node."""
    node = f'"node":"{path.name.split(".")[0]}"'.encode()
    packed = (SHIPPED / "burst.ndjson.zst").read_bytes()
    kept = []
    for line in zstandard.ZstdDecompressor().decompress(packed, 2**30).splitlines(keepends=True):
        kept.append(line.replace(b'"node":"demo"', node))
        if b'"what":"close"' in line:
            break
    content = b"".join(kept)
    path.write_bytes(zstandard.compress(content) if path.suffix == ".zst" else content)


def _model(path: Path) -> None:
    """A model's folder, with a tokenizer that knows no word."""
    tokenizers = pytest.importorskip("tokenizers", reason="needs the extra 'guard'")
    path.mkdir()
    _json(CONFIG, path / "config.json")
    unknown = tokenizers.models.WordLevel({"?": 0}, unk_token="?")
    tokenizers.Tokenizer(unknown).save(str(path / "tokenizer.json"))


def _incidents(path: Path) -> None:
    """The interval in which the shipped recording has its first trip."""
    trip = next(r for r in read(SHIPPED / "burst.ndjson.zst") if getattr(r, "what", "") == "trip")
    _json([[trip.ts_ns / 1e9 - 2, trip.ts_ns / 1e9 + 3]], path)


def _snapshot(path: Path) -> None:
    """Text pins what vision left, and what fits in all free bytes fits in none of the holes."""
    recorder = Recorder(capacity=96 * MIB)
    images = []
    for _ in range(8):
        images.append(recorder.malloc(8 * MIB, kind="vision"))
        recorder.malloc(2 * MIB, kind="text")
    for block in images:
        recorder.free(block)
    try:
        recorder.malloc(40 * MIB, kind="vision")
    except OutOfMemory:
        dump(path, recorder.snapshot())


def detectable(seed: int, path: Path, count: int = 300, conflicts: bool = True) -> None:
    """Pools in which now and then an image does not fit, and memory is out a moment later."""
    draw = random.Random(seed)
    with Writer(path, header("n", "default", START_NS)) as writer:
        for number in range(count):
            now, large = START_NS + number * 10**8, conflicts and draw.random() < 0.1
            writer.write(
                Pool(
                    ts_ns=now, node="n", device="gpu0", reserved_bytes=2**28,
                    allocated_bytes=2**27, free_bytes=2**27, largest_free_bytes=2**24,
                    releasable_bytes=0, capacity_bytes=2**28, device_free_bytes=0,
                    fragmentation_ratio=0.875, vision_tokens=3000 if large else 100,
                    fits=Fits(fits=not large, allocations=1, peak_bytes=1),
                )
            )  # fmt: skip
            if large:
                writer.write(Event(ts_ns=now + 10**8, node="n", device="gpu0", what="oom"))


def _kineto(path: Path) -> None:
    """Two ranks of a training job, under the names that a profiler gives them."""
    folder = path if path.name == "traces" else path.parent
    folder.mkdir(exist_ok=True)
    plain = folder / "trace.json"
    write_trace(plain, 400)
    for rank in range(2):
        text = plain.read_text().replace('"rank": 0', f'"rank": {rank}')
        (folder / f"rank{rank}.pt.trace.json.gz").write_bytes(gzip.compress(text.encode()))
    plain.unlink()


def _spans(path: Path) -> None:
    """A kernel for each modality, as ``probe kernels --record`` writes them."""
    with Writer(path, header("n", "default", START_NS)) as writer:
        for number, modality in enumerate(("vision", "text")):
            writer.write(
                Span(
                    ts_ns=START_NS + 10**6 * number, device="gpu0", stream=str(7 + number),
                    name=f"{modality}_gemm", kind="kernel", duration_ns=10**6, modality=modality,
                )
            )  # fmt: skip


def _nsight(path: Path) -> None:
    """Two kernels and their launches as Nsight Systems exports them."""
    db = sqlite3.connect(path)
    db.executescript(
        f"""CREATE TABLE StringIds (id INTEGER, value TEXT);
        INSERT INTO StringIds VALUES (1,'gemm'),(2,'ncclDevKernel_AllReduce'),
            (3,'cudaLaunchKernel_v7000');
        CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (start INTEGER, end INTEGER, deviceId INTEGER,
            streamId INTEGER, correlationId INTEGER, globalPid INTEGER, demangledName INTEGER);
        CREATE TABLE CUPTI_ACTIVITY_KIND_RUNTIME (start INTEGER, end INTEGER,
            correlationId INTEGER, globalTid INTEGER, nameId INTEGER);
        INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES (3000, 5000, 0, 7, 11, {5 << 24}, 1),
            (1000, 3500, 0, 13, 12, {5 << 24}, 2);
        INSERT INTO CUPTI_ACTIVITY_KIND_RUNTIME VALUES (500, 600, 11, {(5 << 24) + 1}, 3),
            (400, 450, 12, {(5 << 24) + 1}, 3);"""
    )
    db.commit()
    db.close()


def _flight_recorder(path: Path) -> None:
    """Dumps of three ranks of which one never came to the second collective."""
    path.mkdir()
    group = {"0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1, 2]"}}
    for rank in range(3):
        entries = [
            {"process_group": ["0", "default_pg"], "collective_seq_id": number,
             "profiling_name": "nccl:all_reduce", "state": "scheduled", "retired": False}
            for number in ((7,) if rank == 2 else (7, 8))
        ]  # fmt: skip
        _json({"version": "2.9", "pg_config": group, "entries": entries}, path / f"_dump_{rank}")


def _traceg(width: int, path: Path) -> None:
    """A kernel that loads ``width`` bytes a thread and stores 4, as Accel-Sim traces it."""
    body = "".join(
        f"{16 * i:04x} ffffffff 1 R2 LDG.E 1 R8 {width} 1 {hex(0x1000 + 4096 * i)} {width}\n"
        f"{16 * i + 8:04x} ffffffff 0 STG.E 2 R8 R2 4 1 {hex(0x800000 + 128 * i)} 4\n"
        for i in range(64)
    )
    path.write_text(
        f"-kernel name = {path.stem}\n-kernel id = 1\n#traces format = …\n#BEGIN_TB\nwarp = 0\n"
        f"insts = 128\n{body}#END_TB\n"
    )


def _all_traceg(path: Path) -> None:
    for name, width in (("vision", 16), ("text", 4), ("kernel", 8)):
        _traceg(width, path.with_name(f"{name}.traceg"))


def _fingerprints(path: Path) -> None:
    """What ``fingerprint trace`` gives for a few kernels: a document, or a line for each."""
    made = [tasks.of(one, "locality") for one in list(zoo.kernels(1))[:3]]
    if path.name in ("a.json", "b.json", "decode.json"):
        made = made[path.name == "b.json" :][:1]
    if path.suffix == ".ndjson":
        path.write_bytes(b"".join(msgspec.json.encode(task) + b"\n" for task in made))
    else:
        path.write_bytes(msgspec.json.encode({"schema": 1, "tasks": made}))


def _accesses(path: Path) -> None:
    """Two heads that load the same lines in turn, each for one token of each modality."""
    stream = path.stem if path.stem in ("vision", "text") else ""
    count = 400
    made = accesses.make(
        "t", [4096 * (1 + (stream == "text")) + 64 * (i // 2 % 40) for i in range(count)],
        [4] * count, [False] * count, head=[i % 2 for i in range(count)], layer=[0] * count,
        token=[7 + i % 2 for i in range(count)],
        stream=[0 if stream == "vision" else 1 if stream else i % 2 for i in range(count)],
        streams=("vision", "text"),
    )  # fmt: skip
    path.write_bytes(b"".join(encode(record) + b"\n" for record in accesses.records(made)))


def _ring(path: Path) -> None:
    """What a kernel with trace calls left: two tokens, a load and a store each."""
    rows = [(token, pc, pc | 4 << 8, 0x1000 + 4 * pc) for token in (7, 8) for pc in (0, 1)]
    path.write_bytes(b"".join(struct.pack("<QIIQ", *row) for row in rows))
    assert path.stat().st_size == 4 * paths.RECORD.itemsize


def _sites(path: Path) -> None:
    made = ptx.instrument((FIXTURES / "ptx" / "kernels.ptx").read_text())
    path.write_bytes(msgspec.json.encode({"schema": 1, "sites": made.sites}))


def _parquet(rows: list[dict[str, object]], path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)


def _collectives(path: Path) -> None:
    """Timings of two devices, 10 µs and a rate."""
    rows: list[dict[str, object]] = [
        {"device": "A100", "op_name": "alltoall", "nccl_dtype": "half", "num_gpus": 2,
         "message_size": 2**n, "latency": (10 + 2**n / 2**17) / 1e3}
        for n in range(8, 28)
    ]  # fmt: skip
    _parquet(rows, path)


def _encoder(path: Path) -> None:
    """Encoder attention that needs 64 heads at work before it gets slower."""
    rows: list[dict[str, object]] = [
        {"device": "X", "batch_size": images, "isl": patches, "num_heads": heads, "head_dim": 72,
         "attn_dtype": "bfloat16", "latency": 1e-4 + max(images * heads, 64) * patches**2 * 1e-9}
        for heads in (2, 4, 8, 16) for images in (1, 2, 4, 8) for patches in (256, 1024)
    ]  # fmt: skip
    _parquet(rows, path)


def _result(path: Path) -> None:
    """What ``benchmark device`` measured; on Friday and after, everything a tenth slower."""
    slower = 1.1 if path.stem in ("friday", "after") else 1.0
    blocks = [slower * value for value in (10.0, 10.1, 9.9, 10.05, 9.95)]
    figures = [{"figure": "time_s", "blocks": blocks, "better": "lower"}]
    _json({"schema": 1, "benchmark": "device", "figures": figures, "notes": []}, path)


def _nccl_tests(path: Path) -> None:
    """A log of nccl-tests between two devices, 10 µs and 200 GB/s."""
    rows = "".join(
        f"{2**n:12d} {2**n // 4:12d} float {10 + 2**n / 2e5:9.2f} 1.00 1.00 0\n"
        for n in range(8, 28)
    )
    path.write_text(
        "# nThread 1 nGpus 2 minBytes 256 maxBytes 134217728 step: 2(factor)\n"
        "#  Rank  0 Group  0 Pid 9 on a device  0 [0x01] NVIDIA A100-SXM4-80GB\n"
        "#  Rank  1 Group  0 Pid 9 on a device  1 [0x03] NVIDIA A100-SXM4-80GB\n"
        "#       size         count    type     time   algbw   busbw  error\n"
        f"#        (B)    (elements)              (us)  (GB/s)  (GB/s)\n{rows}"
    )


def _table(path: Path) -> None:
    """A device's temperature by the second, with ten seconds that are out of order."""
    rows = [(1_700_000_000 + i, 95 if 300 <= i < 310 else 55 + i % 3) for i in range(600)]
    if path.name == "series.csv":
        path.write_text("timestamp,value\n" + "".join(f"{at},{value}\n" for at, value in rows))
    else:
        path.write_text("time,temp,mem\n" + "".join(f"{at},{t},40960\n" for at, t in rows))


def _workload(path: Path) -> None:
    rows = "".join(f"2023-11-16 18:{i // 60:02d}:{i % 60:02d}.0,{300 + i},40\n" for i in range(80))
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + rows)


def _measured(path: Path) -> None:
    """Requests as vLLM measured them: a prefill of 50 ms, then a token every 20 ms."""
    rows = [
        {"request_id": f"r{i}", "input_toks": 500, "output_toks": 51, "arrival_time": i * 1.0,
         "queued_ts": i * 1.0, "scheduled_ts": i + 0.001, "first_token_ts": i + 0.05,
         "last_token_ts": i + 1.05}
        for i in range(20)
    ]  # fmt: skip
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def _servegen(path: Path) -> None:
    """A client of ServeGen: two windows of ten minutes, one size of request."""
    path.mkdir()
    sizes = {"text_tokens": 200, "image_tokens": 1200, "image_count": 1, "output_tokens": 40}
    window = {name: f"{{{value}: 1.0}}" for name, value in sizes.items()}
    _json({"0": window, "600": window}, path / "chunk-0-dataset.json")
    (path / "chunk-0-trace.csv").write_text("0,0.8,0.5,Gamma,3.0,0.3\n600,0.9,0.7,Gamma,2.0,0.5\n")


def _frozen(path: Path) -> None:
    """A decode that was frozen."""
    subprocess.run(
        [sys.executable, "-m", "mmctl", "schedule", "migrate", "torch:cpu", "--cache", "64",
         "--image", "0", "--tokens", "8", "--out", path],
        check=True, capture_output=True,
    )  # fmt: skip


def _operations(path: Path) -> None:
    """Operation tables of a model on a device, by doubling."""
    path.mkdir()
    (path.parent / "meta.yaml").write_text("hardware: RTX4090\nmodel: meta-llama/Llama-3.1-8B\n")
    sizes = [2**n for n in range(12)]
    dense = [f"{layer},{n},{2 + n / 50}\n" for layer in ("qkv_proj", "layernorm") for n in sizes]
    (path / "dense.csv").write_text("layer,tokens,time_us\n" + "".join(dense))
    head = [f"lm_head,{n},{1000 + n}\n" for n in sizes[:9]]
    (path / "per_sequence.csv").write_text("layer,sequences,time_us\n" + "".join(head))
    chunks, contexts, counts = ([0, *(2**n for n in range(4, top))] for top in (12, 15, 0))
    counts = [0, *(2**n for n in range(9))]
    attention = [
        f"{chunk},{before},{count},{context},{5 + chunk * before / 1e5 + count * context / 1e5}\n"
        for chunk in chunks for before in (contexts if chunk else [0])
        for count in counts for context in (contexts[1:] if count else [0])
    ]  # fmt: skip
    (path / "attention.csv").write_text(
        "prefill_chunk,kv_prefill,n_decode,kv_decode,time_us\n" + "".join(attention)
    )


def _fat_binary(path: Path) -> None:
    """A library with a cubin for sm_80 and PTX of it."""
    body = b""
    for kind in (2, 1):
        head = struct.pack("<HHIQIIHHI", kind, 0x101, 64, 32, 0, 0, 0, 1, 80)
        body += head.ljust(64, b"\0") + b"\1" * 32
    path.write_bytes(struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(body)) + body)


CONFIG = {
    "model_type": "qwen2_5_vl", "hidden_size": 3584, "intermediate_size": 18944,
    "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4,
    "vocab_size": 152064, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    "vision_config": {
        "depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16,
        "in_chans": 3, "out_hidden_size": 3584, "patch_size": 14, "spatial_merge_size": 2,
        "temporal_patch_size": 2, "window_size": 112, "fullatt_block_indexes": [7, 15, 23, 31],
    },
}  # fmt: skip
MODULE = """
import torch

def step():
    return torch.zeros(64, 64) @ torch.zeros(64, 64)

def prefill():
    q, k = torch.zeros(1, 4, 96, 64), torch.zeros(1, 2, 96, 64)
    return torch.nn.functional.scaled_dot_product_attention(q, k, k, enable_gqa=True)

def build():
    return torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU()), (torch.zeros(2, 64),)

decode_step = encode = decode = step
"""
OUT_OF_MEMORY = (
    "INFO serving\ntorch.OutOfMemoryError: CUDA out of memory. Tried to allocate 48.00 MiB. "
    "GPU 0 has a total capacity of 23.65 GiB of which 43.00 MiB is free. Including non-PyTorch "
    "memory, this process has 23.60 GiB memory in use. Of the allocated memory 22.20 GiB is "
    "allocated by PyTorch, and 371.00 MiB is reserved by PyTorch but unallocated.\n"
)
COUNTERS = """"ID","Kernel Name","Stream","lts__t_sector_hit_rate.pct","lts__t_sectors.sum"
"","","","%","sector"
"0","vit","7","80.00","3,000"
"2","bert","8","50.0","4,000"
"""
REQUESTS = (
    '{"id": 1, "images": 1, "vision_tokens": 900}\n{"id": 2, "text_tokens": 9}\n'
    '{"id": 1, "state": "completed"}\n'
)
ANSWERS = """
def answer(image, question):
    return {"text": f"{image.mean():.3f} {len(question)}"}
"""
GRAPH = {
    "nodes": [
        {"name": "vit", "flops": 5e12, "output_bytes": 4096, "modality": "vision"},
        {"name": "lm", "flops": 9e12, "inputs": ["vit"], "modality": "text"},
    ]
}
PLAN = {
    "schema": 1, "model": "qwen3-vl-8b", "devices": "h100_sxm:1,l4:2", "policy": "perception",
    "batched_tokens": 2048, "sequences": 256, "encode_patches": 16384, "encode_images": 8,
    "age_s": None, "decode_ratio": 1.0, "inline_images": 0, "queues": [],
}  # fmt: skip
ARM = {"name": "arm", "kind": "cpu", "isa": "aarch64", "cpu_features": ["asimd", "sve"]}
INCIDENT = [1_700_000_300, 1_700_000_320]

FILES: dict[str, Make] = {
    **dict.fromkeys(
        ("node.ndjson", "run.ndjson", "run.ndjson.zst", "a17.ndjson.zst", "b3.ndjson.zst"),
        _recording,
    ),
    **dict.fromkeys(("dump.pickle", "snapshot.pickle", "oom.pickle"), _snapshot),
    **{f"{name}.ndjson": partial(detectable, seed)
       for seed, name in enumerate(("night", "morning", "evening"))},
    **{name: partial(_copy, FIXTURES / "readers" / name)
       for name in ("topo.txt", "p2p.txt", "nvbandwidth.json")},
    **dict.fromkeys(("a.json", "b.json", "decode.json", "tasks.json", "tasks.ndjson"),
                    _fingerprints),
    **dict.fromkeys(("accesses.ndjson", "vision.ndjson", "text.ndjson"), _accesses),
    **dict.fromkeys(("bench.py", "model.py", "m.py"), partial(_write, MODULE)),
    **dict.fromkeys(("kernel.traceg", "vision.traceg", "text.traceg", "*.traceg"), _all_traceg),
    "server.log": partial(_write, OUT_OF_MEMORY),
    "kern.log": partial(_copy, FIXTURES / "readers" / "kernel.log"),
    "config.json": partial(_json, CONFIG),
    "Qwen2.5-VL-7B-Instruct": _model,
    **dict.fromkeys(("rank*.pt.trace.json.gz", "traces"), _kineto),
    "spans.rec": _spans,
    "report.sqlite": _nsight,
    "flight_recorder": _flight_recorder,
    "bpftrace.log": partial(_write, "K 5 7 7 0\nS 9 0 7 3\nK 12 7 7 0\n"),
    "metrics.csv": partial(_write, COUNTERS),
    "kernel.ptx": partial(_copy, FIXTURES / "ptx" / "kernels.ptx"),
    "ring.bin": _ring,
    "sites.json": _sites,
    "nccl_perf.parquet": _collectives,
    "encoder_attention_perf.parquet": _encoder,
    **dict.fromkeys(("monday.json", "friday.json", "before.json", "after.json"), _result),
    "alltoall.log": _nccl_tests,
    "smi.csv": _table,
    "series.csv": _table,
    "incidents.json": _incidents,
    "combined_windows.json": partial(_json, {"real/series.csv": [INCIDENT]}),
    "serve.py": partial(_write, "import time\nprint('serving')\ntime.sleep(600)\n"),
    "myserver": lambda path: _write(ANSWERS, path.with_suffix(".py")),
    "trace.csv": _workload,
    "run/requests.jsonl": _measured,
    "servegen/mm-image": _servegen,
    "plan.json": partial(_json, PLAN),
    "decode.safetensors": _frozen,
    "profiles/tp1": _operations,
    "graph.json": partial(_json, GRAPH),
    "arm.json": partial(_json, ARM),
    "libkernels.so": _fat_binary,
    "requests.ndjson": partial(_write, REQUESTS),
    "mmctl.toml": partial(_write, 'extends = "default"\n'),
}  # fmt: skip
