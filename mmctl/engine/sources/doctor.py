"""What can be read here, what cannot, and why: checks with ids that stay, each with its fix."""

from __future__ import annotations

import os
import platform
import shutil
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from importlib import metadata, util
from pathlib import Path
from typing import Any

import msgspec

from mmctl.engine import folders, profiles
from mmctl.engine.errors import MmctlError, install
from mmctl.engine.profiles import Profile
from mmctl.engine.records import Event
from mmctl.engine.sources import SCHEMES, load, open_sources
from mmctl.engine.sources.check import Check
from mmctl.engine.sources.nvml_checks import kernel_driver

EXTRAS: dict[str, tuple[str, tuple[str, ...]]] = {
    "torch": ("the live demo, and measuring with models", ("torch", "sacrebleu")),
    "fast": ("large snapshots and traces in a fraction of the time", ("numba",)),
    "files": ("Parquet files and PNG pictures", ("pyarrow", "PIL")),
    "openvino": ("running and moving a decode on OpenVINO", ("openvino",)),
    "onnx": ("the learned detector, and a decode on onnxruntime", ("onnx", "onnxruntime")),
    "ray": ("schedule plan and sweep on a Ray cluster", ("ray",)),
    "otel": ("probe serve --otlp", ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http")),
    "guard": ("breaker guard, and measuring it", ("aiohttp", "PIL", "tokenizers")),
}
"""What each extra of the package is for, and the modules that it brings."""

_PORTS = {
    8000: ("vLLM or Triton", "start the engine with its metrics on"),
    8002: ("Triton's metrics", "start tritonserver with --allow-metrics=true"),
    30000: ("SGLang", "start sglang with --enable-metrics"),
    9400: ("dcgm-exporter", "see its log"),
    8082: ("npu-exporter", "see its log"),
    5000: ("AMD's device-metrics-exporter", "see its log"),
}
_CAPABILITIES = {"CAP_SYS_ADMIN": 21, "CAP_PERFMON": 38, "CAP_BPF": 39}
_LOW_BYTES = 1 << 30


def checks(sources: Sequence[str], profile_name: str | None) -> Iterator[Check]:
    """Every check in turn, each scheme's among them; one that itself fails is a problem too."""
    steps: list[tuple[str, Callable[[], Iterator[Check]]]] = [
        ("profile", lambda: _profile(profile_name)),
        *((name, load(check)) for name, scheme in SCHEMES.items() for check in scheme.checks),
        ("ebpf", _ebpf), ("ports", _ports), ("extras", _extras), ("disk", _disk),
    ]  # fmt: skip
    for name, step in steps:
        try:
            yield from step()
        except OSError as error:
            yield Check(f"doctor.{name}", "problem", f"the check failed: {error.strerror or error}")
    yield from _sources(sources, profile_name)


def _profile(name: str | None) -> Iterator[Check]:
    try:
        chosen = name or profiles.selected()[0]
        _, problems = profiles.check(chosen)
    except MmctlError as error:
        yield Check("profile.valid", "problem", str(error), "mmctl profile use default")
        return
    if problems:
        yield Check(
            "profile.valid",
            "problem",
            f"'{chosen}' has {len(problems)} problems: {problems[0]}",
            f"mmctl profile validate {chosen}",
        )
    else:
        yield Check("profile.valid", "ok", f"profile '{chosen}' is in force")


def _ebpf() -> Iterator[Check]:
    """Whether kernel timelines can be aligned with the devices'."""
    tool = shutil.which("bpftrace")
    effective = 0
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("CapEff:"):
            effective = int(line.split()[1], 16)
    has = [name for name, bit in _CAPABILITIES.items() if effective >> bit & 1]
    able = "CAP_SYS_ADMIN" in has or {"CAP_BPF", "CAP_PERFMON"} <= set(has)
    if tool is None:
        yield Check(
            "ebpf.tool",
            "absent",
            "bpftrace is not installed: no aligned kernel timelines",
            "apt-get install bpftrace",
        )
    if able:
        yield Check("ebpf.capability", "ok", ", ".join(has))
    else:
        yield Check(
            "ebpf.capability",
            "problem" if tool else "absent",
            "neither CAP_SYS_ADMIN nor CAP_BPF with CAP_PERFMON",
            "run as root, or with --cap-add BPF --cap-add PERFMON",
        )


def _ports() -> Iterator[Check]:
    """Engines and exporters that listen on this host's loopback, by their usual ports."""
    from mmctl.engine.sources.page import readings

    profile = profiles.load("default").profile
    quick = msgspec.structs.replace(
        profile, sources=msgspec.structs.replace(profile.sources, timeout_s=1.0)
    )
    for port, (name, fix) in _PORTS.items():
        with socket.socket() as probe:
            probe.settimeout(0.2)
            if probe.connect_ex(("127.0.0.1", port)) != 0:
                continue
        url = f"http://127.0.0.1:{port}/metrics"
        found = readings(url, quick)
        try:
            records = next(found)
            yield Check(f"engine.port.{port}", "ok", f"{url} gives {len(records)} readings")
        except MmctlError as error:
            yield Check(f"engine.port.{port}", "problem", f"{name} may listen there: {error}", fix)
        finally:
            found.close()  # type: ignore[attr-defined]


def _extras() -> Iterator[Check]:
    for extra, (purpose, modules) in EXTRAS.items():
        missing = [name for name in modules if not _is_installed(name)]
        if missing:
            lacks = f"for {purpose}; not installed: {', '.join(missing)}"
            yield Check(f"extra.{extra}", "absent", lacks, install(extra))
        else:
            yield Check(f"extra.{extra}", "ok", f"for {purpose}")


def _is_installed(name: str) -> bool:
    try:
        return util.find_spec(name) is not None
    except (ImportError, ValueError):
        return False


def _disk() -> Iterator[Check]:
    folder = folders.state()
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    if not os.access(folder, os.W_OK):
        fix = "chown it, or set XDG_STATE_HOME to a folder of yours"
        yield Check("state.folder", "problem", f"{folder} cannot be written", fix)
        return
    free = shutil.disk_usage(folder).free
    if free < _LOW_BYTES:
        yield Check(
            "state.folder",
            "problem",
            f"{free >> 20} MiB are free in {folder}",
            "make room: a full disk pauses recordings",
        )
    else:
        yield Check("state.folder", "ok", f"{folder} can be written, {free >> 30} GiB free")


def _sources(sources: Sequence[str], profile_name: str | None) -> Iterator[Check]:
    """Each source that was named, or that the profile reads by default: one reading of it."""
    try:
        profile: Profile = profiles.load(profile_name).profile
    except MmctlError:
        profile = profiles.load("default").profile
    for uri in sources or profile.sources.default:
        count = 0
        reason = None
        stop = threading.Event()
        try:
            records = open_sources([uri], profile, stop, 1)
            for record in records:
                if isinstance(record, Event) and record.what == "source":
                    reason = record.message
                else:
                    count += 1
                if count >= 1000:
                    break
            stop.set()
        except MmctlError as error:
            reason = str(error)
        if count:
            yield Check(f"source.{uri}", "ok", f"{count} records in one reading")
        else:
            named = uri in sources
            yield Check(
                f"source.{uri}",
                "problem" if named else "absent",
                reason or "it gives nothing",
                "see the checks above, or the source's own log"
                if named
                else "see the checks above; or name another, such as a metrics page",
            )


def versions() -> dict[str, Any]:
    """What is installed: this program, Python, the kernel, the driver, and what mmctl stands on."""
    packages: dict[str, str | None] = {}
    for name in (
        "mmctl",
        "nvidia-ml-py",
        "psutil",
        "msgspec",
        "textual",
        "typer",
        "numpy",
        "torch",
        "prometheus_client",
        "zstandard",
        "vllm",
        "sglang",
    ):
        try:
            packages[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            packages[name] = None
    return {
        "python": sys.version.split()[0],
        "platform": platform.platform(),
        "kernel": platform.release(),
        "nvidia_kernel_module": kernel_driver(),
        "packages": packages,
    }
