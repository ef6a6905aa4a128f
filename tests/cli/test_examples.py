"""Every example of every help text is run as printed, and every option is in one.

A new example needs nothing here unless it names a file (``examples/files.py``) or a service
(``examples/services.py``) that no other names, or runs until it is stopped.
"""

from __future__ import annotations

import csv
import importlib.util
import io
import json
import os
import re
import shlex
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from mmctl.cli.app import load
from tests.cli.examples.files import prepare
from tests.cli.examples.lines import calls, examples, leaves, lines
from tests.cli.examples.running import Ended, to_its_end, until_told
from tests.cli.examples.services import begin, programs

MORE = r"""
mmctl top demo --theme sixteen --ascii
mmctl probe host: --interval 100ms --duration 1s -o csv
mmctl probe snapshot dump.pickle --at 12 --max-size 1GiB --max-entries 100000 --max-depth 200
mmctl probe align --npu ./libstub.so:aclrtLaunchKernel --record spans.ndjson -o json -- ./server
mmctl probe serve host: --listen 127.0.0.1:0 --duration 1s
mmctl fingerprint trace --module bench.py:decode_step --record step.ndjson -o json
mmctl fingerprint compare vision.traceg text.traceg --algorithm classic --record pairs.ndjson
mmctl fingerprint matrix vision.ndjson text.ndjson --by-stream --algorithm classic
mmctl fingerprint contention accesses.ndjson --cycles 100000
mmctl fingerprint paths ring.bin --limit 1 --count 4
mmctl benchmark device cpu0 --threads 1
mmctl benchmark stages encoder_attention_perf.parquet --heads 16 --head-dim 72 --batch 8 \
  --hold-out 4,16
mmctl benchmark stages --threads 2
mmctl benchmark links nccl_perf.parquet --operation alltoall
mmctl benchmark links --ranks 2 --backend gloo
mmctl benchmark responses --threads 1 --runs 3 --requests 1
mmctl benchmark pool --pairs 100 -o json
mmctl benchmark detector --seed 3
mmctl benchmark guard --mixture --rate 20 --rounds 2 --mixture-rate 2 --round 5s
mmctl breaker watch host: --all --duration 1s -o ndjson
mmctl breaker evaluate smi.csv --map 'ts=time,temp=temperature_c' --labels incidents.json
mmctl breaker verify --golden good.json --endpoint http://127.0.0.1:8000 --model small-vl
mmctl breaker guard --backend http://127.0.0.1:8000 --requests 8 --images 2 --output-tokens 256 \
  --mode enforce --respond cap_output --memory 4GiB --model ./Qwen2.5-VL-7B-Instruct
mmctl schedule plan servegen/mm-image --model qwen2.5-vl-7b --devices l40s:2 --count 20 \
  --clients 0 --seed 3 --output-tokens 20 --budget 1 --engine processes --workers 1
mmctl schedule plan azure --rate 4 --engine ray --address auto
mmctl schedule split graph.json --budget 50ms --threshold 0.1
mmctl schedule sweep servegen/mm-image --model qwen2.5-vl-7b --devices l40s:2 --policy perception \
  --plans 1 --count 20 --clients 0 --seed 3 --workers 1 --slo ttft=2s,itl=100ms,share=90%
mmctl schedule sweep azure --rate 4 --engine ray --address auto
mmctl schedule migrate torch:cpu torch:cpu --cache 64 --image 0 --threads 1 --deadline 5s
mmctl schedule migrate --check xeon arm.json --needs avx512f --dtypes bfloat16 --memory 12GiB
mmctl schedule queues --trace servegen/mm-image --clients 0 --count 100 --seed 3 --devices l40s:2
mmctl schedule rebalance run.ndjson --gather-batch 8
mmctl schedule simulate servegen/mm-image --model qwen2.5-vl-7b --devices l40s:2 --count 20 \
  --clients 0 --seed 3 --sequences 16 --batched-tokens 1024 --blocks 20000 --encoder-cache 8192 \
  --encode-budget 4096 --repeat-images 0.5 --no-prefix-cache --receipts why.ndjson
mmctl schedule simulate trace.csv --limit 20 --output-tokens 30 --stages
"""
"""Options whose place is not in a help text, each run once."""

SLOW = "MMCTL_SLOW" in os.environ  # read now: tests run in a clean environment
LINES = [*examples(), *lines(MORE)]

UNTIL_STOPPED = (
    r"mmctl top (?!.*--once)",
    r"mmctl probe nvml: .*--interval|mmctl probe --record",
    r"mmctl probe serve(?! --print)",
    r"mmctl breaker (watch|guard|run)",
)
"""What runs until it is stopped: by then it must be at work."""

LONG = (
    r"mmctl benchmark(?!.*(\.(json \w|parquet|log|txt|pickle)|--published|--pairs 100))",
    r"--seeds|--requests 10,50,200 --hours 24",
    r"breaker verify .*--worker|schedule simulate .*--policy all",
    r"mmctl schedule (sweep|plan|migrate)(?!.*(--check|--count 20))",
)
"""What takes longer than a test may: at work, it is told to end. To its end by MMCTL_SLOW=1."""

STOPPED = UNTIL_STOPPED if SLOW else (*UNTIL_STOPPED, *LONG)

MISSING = {
    r"openvino:NPU": (lambda: False, "needs an NPU"),
    r"--device cuda|device gpu0": (lambda: has("torch") and cuda(), "needs a CUDA device"),
    r"--engine ray": (lambda: SLOW and has("ray"), "needs the extra 'ray', and MMCTL_SLOW=1"),
    r"benchmark fingerprints(?! --hta)": (lambda: has("transformers"), "needs transformers"),
    r"openvino:": (lambda: has("openvino"), "needs the extra 'openvino'"),
    r"onnxruntime:": (lambda: has("onnxruntime"), "needs the extra 'onnx'"),
    r"benchmark detector": (lambda: has("onnxruntime"), "needs the extra 'onnx'"),
    r"--otlp": (lambda: has("opentelemetry"), "needs the extra 'otel'"),
    r"--address": (lambda: False, "needs a Ray cluster"),
    r"--hta ": (lambda: False, "needs an environment with HolisticTraceAnalysis"),
}
"""What some examples need and most machines lack."""

FAILS = r"--fault"
"""A drill ends as what it drills would: exit 1, and its report all the same."""


def has(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def cuda() -> bool:
    import torch

    return torch.cuda.is_available()


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What is compiled once on a machine, is compiled once here."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def environment(
    tmp_path: Path, cache: Path, nvml_stub, clean_home: Path
) -> Iterator[dict[str, str]]:
    """A node with four devices (a stand-in for their library) and nothing left of before."""
    # Short: the path of a socket has 107 bytes.
    with tempfile.TemporaryDirectory() as temporary:
        yield nvml_stub(
            "count=4", XDG_CACHE_HOME=str(cache), TMPDIR=temporary, TERM="xterm-256color",
            PATH=f"{programs(tmp_path / 'bin')}:{os.environ['PATH']}", OMP_NUM_THREADS="1",
            MMCTL_GUARD_LISTEN="127.0.0.1:0", MMCTL_EXPORT_LISTEN="127.0.0.1:0",
        )  # fmt: skip
        assert not list(Path(temporary).glob("mmctl*")), "a temporary folder was left behind"


@pytest.mark.parametrize("line", LINES)
def test_it_works_as_printed(line: str, tmp_path: Path, environment: dict[str, str]) -> None:
    for pattern, (present, reason) in MISSING.items():
        if re.search(pattern, line) and not present():
            pytest.skip(reason)
    folder = tmp_path / "here"
    folder.mkdir()
    with ExitStack() as stack:
        prepare(line, folder)
        here = begin(line, folder, environment, stack)
        if any(re.search(pattern, line) for pattern in STOPPED):
            ended = until_told(here, folder, environment, terminal="mmctl top" in line)
        else:
            ended = to_its_end(here, folder, environment)
    if ended.code == 4 and re.search("probe align|kmsg:", line):
        pytest.skip(f"this kernel forbids it: {ended.err.strip()}")
    told = f"{here}\n{ended.code}\n{ended.out[-2000:]}\n{ended.err[-2000:]}"
    expected = (143,) if ended.alive else (1,) if re.search(FAILS, line) else (0, 3)
    assert ended.code in expected, told
    for text in (ended.out, ended.err):
        assert "mmctl: error" not in text and "Traceback" not in text, told
    if not ended.alive:
        assert ended.out or ended.err or ">" in line, f"it says nothing\n{told}"
        _check_format(line, ended, folder)


def _check_format(line: str, ended: Ended, folder: Path) -> None:
    """What is asked for by -o or by the name of a file is what comes."""
    words = shlex.split(line.rsplit("|", 1)[-1])
    text, form = ended.out, words[words.index("-o") + 1] if "-o" in words else "table"
    if ">" in words:
        path = folder / words[words.index(">") + 1]
        text, form = path.read_text(), path.suffix[1:]
    if form == "json":
        document = json.loads(text)
        assert document.get("schema") or "--print" in words, text[:300]
    elif form == "ndjson":
        assert all(json.loads(one) for one in text.splitlines())
    elif form == "csv":
        assert len({len(row) for row in csv.reader(io.StringIO(text))}) <= 1, text[:300]
    elif form == "svg":
        assert text.startswith("<svg"), text[:300]


COMMON = {"--profile", "--output", "--no-color", "--quiet", "--debug", "--help", "--force"}


@pytest.mark.parametrize("path", [path for path, _ in leaves()], ids=" ".join)
def test_every_option_is_in_an_example_that_is_run(path: tuple[str, ...]) -> None:
    leaf = dict(leaves())[path]
    used = {word for line in LINES for of, words in calls(line) for word in words if of == path}
    given = {word.partition("=")[0] for word in used}
    options = [
        {*parameter.opts, *parameter.secondary_opts}
        for parameter in load(path[-1], leaf).params
        if parameter.param_type_name == "option" and not COMMON & {*parameter.opts}
    ]
    missing = [max(names, key=len) for names in options if not names & given]
    assert not missing, f"mmctl {' '.join(path)} has no example of {', '.join(missing)}"
