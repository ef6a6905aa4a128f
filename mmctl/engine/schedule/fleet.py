"""Devices in: a list such as ``h100_sxm:4,l4:4@E`` becomes devices with costs and limits.

A name is one of the table of published peaks, a file of peaks (``gpu: mem_bw: …`` as
aiconfigurator writes them), a result of ``mmctl benchmark device`` (measured), or a folder of
operation tables (measured).
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from mmctl.engine import units
from mmctl.engine.devices import results, table
from mmctl.engine.errors import MmctlError, UsageError, nearest
from mmctl.engine.records import Basis
from mmctl.engine.schedule.costs import Cost, Model, Peaks, from_operations, from_peaks
from mmctl.engine.schedule.layout import BLOCK_TOKENS, DECODE, ENCODE, PREFILL

DEVICES_MOST = 4096
USUAL_MODEL = "qwen3-vl-8b"
ROLES = {"E": ENCODE, "P": PREFILL, "D": DECODE}
_PART = re.compile(r"(?P<name>[^@]+?)(?::(?P<count>\d+))?(?:@(?P<role>[EPD]+))?\Z")


class Engine(msgspec.Struct, frozen=True, kw_only=True):
    """How a serving engine on each device is set: vLLM's names and meanings.

    ``host_s`` is what a step costs beside its kernels, ``collective_s`` and
    ``collective_bytes_per_s`` what one all-reduce costs: the constants that are fitted.
    ``link_s`` and ``link_bytes_per_s`` are of a measured link and take the place of each
    device's published one.
    """

    sequences: int = 256
    batched_tokens: int = 2048
    memory_ratio: float = 0.9
    asynchronous: bool = True
    prefix_caching: bool = True
    blocks: int | None = None
    encoder_cache_tokens: int | None = None
    host_s: float = 0.0005
    collective_s: float = 20e-6
    collective_bytes_per_s: float = 16e9
    link_s: float | None = None
    link_bytes_per_s: float | None = None

    @property
    def image_tokens(self) -> int:
        """Tokens of encoded images that are kept: as many as a step may take, unless told."""
        told = self.encoder_cache_tokens
        return max(self.batched_tokens, 16384) if told is None else told


class Device(msgspec.Struct, frozen=True, kw_only=True):
    """One device of a fleet (or a group of ranks that serves one instance); ``given`` is how it
    was named."""

    name: str
    given: str
    system: str
    kind: str
    role: int
    ranks: int
    cost: Cost
    blocks: int
    basis: Basis
    source: str
    link_latency_s: float
    link_bytes_per_s: float
    memory_bytes: float | None = None
    power_w: float | None = None
    idle_w: float | None = None


@cache
def tables() -> tuple[dict[str, Peaks], dict[str, Model]]:
    """The shipped devices and models by name."""
    import tomli

    written = tomli.loads((Path(__file__).parent / "models.toml").read_text("utf-8"))
    devices = {key: _published(device) for key, device in table.table().items()}
    models = {
        name: msgspec.convert({"name": name, **values}, Model)
        for name, values in written["models"].items()
    }
    return devices, models


def model(name: str) -> Model:
    """A model by name (the shipped table) or from the ``config.json`` of a checkpoint."""
    known = tables()[1]
    if name.lower() in known:
        return known[name.lower()]
    path = Path(name)
    if path.is_file() or path.suffix == ".json":
        return _from_config(path)
    raise UsageError(
        f"unknown model '{name}'{nearest(name.lower(), known, 'or the path of a config.json')}"
    )


def _from_config(path: Path) -> Model:
    try:
        config = json.loads(path.read_text("utf-8"))
        text = config.get("text_config", config)
        vision = config.get("vision_config", {})
        heads = int(text["num_attention_heads"])
        merge = int(vision.get("spatial_merge_size", 2))
        wide = int(vision.get("hidden_size", 0) or vision.get("embed_dim", 0))
        return Model(
            name=str(config.get("_name_or_path") or path.parent.name or path.name),
            layers=int(text["num_hidden_layers"]),
            hidden=int(text["hidden_size"]),
            heads=heads,
            kv_heads=int(text.get("num_key_value_heads", heads)),
            head_dim=int(text.get("head_dim") or int(text["hidden_size"]) // heads),
            intermediate=int(text["intermediate_size"]),
            vocabulary=int(text["vocab_size"]),
            vision_layers=int(vision.get("depth", vision.get("num_hidden_layers", 0))),
            vision_hidden=wide,
            vision_heads=int(vision.get("num_heads", vision.get("num_attention_heads", 0))),
            vision_intermediate=int(vision.get("intermediate_size", 4 * wide)),
            patches_per_token=merge * merge if vision else 4,
        )
    except OSError as error:
        raise MmctlError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError, ZeroDivisionError) as error:
        raise MmctlError(f"{path} describes no model that is known here: {error}") from None


def model_for(devices: str) -> str:
    """The model that the first folder of operation tables holds, else the usual one."""
    for name, _ in parts(devices):
        if Path(name).is_dir():
            return model_of(Path(name)).name
    return USUAL_MODEL


def parts(text: str) -> list[tuple[str, str]]:
    """Each device of ``h100_sxm:4,l4:2@E`` by itself: what it is, and its stages (all, unless
    told). UsageError for what is no such list."""
    found: list[tuple[str, str]] = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        match = _PART.match(part)
        if not match:
            raise UsageError(f"'{part}' is no device such as 'h100_sxm:4' or 'l4:2@E'")
        role = "".join(letter for letter in ROLES if letter in (match["role"] or "EPD"))
        count = int(match["count"] or 1)
        if len(found) + count > DEVICES_MOST:
            raise UsageError(f"more than {DEVICES_MOST} devices: simulate a part of the fleet")
        found += [(match["name"], role)] * count
    if not found:
        raise UsageError("no device: name some, such as 'h100_sxm:8'")
    return found


def named(devices: Iterable[tuple[str, str]]) -> str:
    """``parts`` the other way round, alike ones together."""
    counts = Counter(devices)
    return ",".join(f"{name}:{count}@{role}" for (name, role), count in counts.items())


def parse(text: str, of: Model | None, engine: Engine) -> list[Device]:
    """The devices named in ``text``; UsageError for a name that means none.

    ``@E``, ``@PD``, ``@EPD`` … says which stages they do (all, unless told). ``of`` is the
    model they serve; operation tables name their own.
    """
    return [
        _device(f"gpu{i}", name, sum(ROLES[letter] for letter in role), of, engine)
        for i, (name, role) in enumerate(parts(text))
    ]


def _device(name: str, system: str, role: int, of: Model | None, engine: Engine) -> Device:
    path = Path(system)
    if path.is_dir():
        return _measured(name, path, role, of, engine)
    peaks = peaks_of(system)
    served = of or tables()[1][USUAL_MODEL]
    device = Device(
        name=name, given=system, system=peaks.name, kind=peaks.kind, role=role, ranks=1,
        cost=_cost(served, peaks), blocks=engine.blocks or 0, basis="modelled",
        source=peaks.source,
        link_latency_s=peaks.link_latency_s if engine.link_s is None else engine.link_s,
        link_bytes_per_s=engine.link_bytes_per_s or peaks.link_bytes_per_s,
        memory_bytes=None if engine.blocks else peaks.memory_bytes * engine.memory_ratio,
        power_w=peaks.power_w, idle_w=peaks.idle_w,
    )  # fmt: skip
    return with_role(device, served, role)


def peaks_of(system: str) -> Peaks:
    """The peaks of a device by its name in the table, or from a file of peaks or a result."""
    path = Path(system)
    if path.is_file():
        return _from_result(path) if results.is_result(path) else _from_yaml(path)
    known = tables()[0]
    if system not in known and _is_path(system):
        raise MmctlError(f"cannot read {system}: No such file or directory")
    if system not in known:
        raise UsageError(
            f"unknown device '{system}'"
            + nearest(
                system.lower(),
                known,
                "a file of peaks, a result of mmctl benchmark",
                "or a folder of operation tables",
            )
        )
    return known[system]


def _is_path(name: str) -> bool:
    """Whether a person who typed this meant a file."""
    return "/" in name or Path(name).suffix in (".json", ".yaml", ".yml")


def _published(device: table.Published) -> Peaks:
    half = device.rates.get("bf16") or device.rates["fp16"]
    return Peaks(
        name=device.key, kind=device.kind, flops_per_s=half.value,
        bandwidth_bytes_per_s=device.bandwidth.value, memory_bytes=int(device.memory.value),
        power_w=device.power.value, idle_w=device.idle.value,
        link_bytes_per_s=device.link.value, source=half.source,
    )  # fmt: skip


def _from_result(path: Path) -> Peaks:
    """What a device was measured to reach: nothing is taken off for kernels that reach less."""
    found = results.device(path)
    if found.memory_bytes is None:
        raise MmctlError(f"{path} does not tell the memory of {found.name}")
    more = {} if found.link_bytes_per_s is None else {"link_bytes_per_s": found.link_bytes_per_s}
    if found.overhead_s is not None:
        more["kernel_s"] = found.overhead_s
    return Peaks(
        name=path.stem, kind=found.kind, flops_per_s=found.flops_per_s,
        bandwidth_bytes_per_s=found.bandwidth_bytes_per_s, memory_bytes=found.memory_bytes,
        power_w=found.power_w, idle_w=found.idle_w, compute_ratio=1.0, bandwidth_ratio=1.0,
        basis="measured", source=f"{found.name} measured at {found.precision}, {path.name}",
        **more,
    )  # fmt: skip


def with_role(device: Device, served: Model, role: int) -> Device:
    """The device doing other stages: the KV cache gets what the weights leave.

    One too small for the decoder keeps the encoder alone, where there is one to keep.
    """
    if device.memory_bytes is None:
        return msgspec.structs.replace(device, role=role)
    vision = served.vision_weight_bytes
    weights = (vision if role & ENCODE else 0) + (
        served.weight_bytes if role & (PREFILL | DECODE) else 0
    )
    blocks = int((device.memory_bytes - weights) // (served.kv_bytes_per_token * BLOCK_TOKENS))
    if blocks < 1:
        if role != ENCODE and vision and vision < device.memory_bytes:
            return with_role(device, served, ENCODE)
        raise UsageError(
            f"{device.system} has {units.show_bytes(device.memory_bytes)} to use, too little for "
            f"{served.name} ({units.show_bytes(weights)})"
        )
    return msgspec.structs.replace(device, role=role, blocks=blocks)


@cache
def _roofline(served: str, peaks: str) -> Cost:
    return from_peaks(
        msgspec.json.decode(served, type=Model), msgspec.json.decode(peaks, type=Peaks)
    )


def _cost(served: Model, peaks: Peaks) -> Cost:
    """One table for all devices of a kind."""
    return _roofline(msgspec.json.encode(served).decode(), msgspec.json.encode(peaks).decode())


_NUMBER = re.compile(r"^\s+(\w+):\s*([-+0-9.eE]+)\s*(?:#.*)?$")


def _from_yaml(path: Path) -> Peaks:
    """Peaks of a system file: the plain ``key: number`` lines of it."""
    try:
        lines = path.read_text("utf-8").splitlines()
    except OSError as error:
        raise MmctlError(f"cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise MmctlError(f"{path} is no file of peaks") from None
    values: dict[str, float] = {}
    for line in lines:
        if found := _NUMBER.match(line):
            try:
                values.setdefault(found[1], float(found[2]))
            except ValueError:
                continue
    try:
        return Peaks(
            name=path.stem, kind="gpu", flops_per_s=values["bfloat16_tc_flops"],
            bandwidth_bytes_per_s=values["mem_bw"], memory_bytes=int(values["mem_capacity"]),
            power_w=values.get("power"), link_bytes_per_s=values.get("intra_node_bw", 32e9),
            link_latency_s=values.get("p2p_latency", 10e-6),
            bandwidth_ratio=values.get("mem_bw_empirical_scaling_factor", 0.8),
            kernel_s=values.get("mem_empirical_constant_latency", 3e-6), source=path.name,
        )  # fmt: skip
    except KeyError as error:
        raise MmctlError(f"{path} names no {error}: not a file of peaks") from None


def model_of(path: Path) -> Model:
    """The model whose operations a folder of tables holds."""
    folder = path if not (path / "attention.csv").is_file() else path.parent
    return model(str(_words(folder / "meta.yaml").get("model", "")).split("/")[-1])


def _measured(name: str, path: Path, role: int, of: Model | None, engine: Engine) -> Device:
    """A device whose operations were measured; ``tpN`` folders are N ranks of one instance."""
    folder = path
    if not (folder / "attention.csv").is_file():
        inside = sorted(path.glob("tp*"))
        if len(inside) != 1:
            raise UsageError(
                f"{path} holds no attention.csv"
                + (f"; name one of {', '.join(p.name for p in inside)}" if inside else "")
            )
        folder = inside[0]
    ranks = int(folder.name[2:]) if re.fullmatch(r"tp\d+", folder.name) else 1
    written = _words(folder.parent / "meta.yaml")
    served = of or model(str(written.get("model", "")).split("/")[-1])
    system = str(written.get("hardware", folder.parent.parent.name))
    peaks = tables()[0].get(system.lower())
    cost = _operations(
        str(folder), msgspec.json.encode(served).decode(), ranks, engine.collective_s,
        engine.collective_bytes_per_s,
    )  # fmt: skip
    blocks = engine.blocks
    if blocks is None:
        if peaks is None:
            raise UsageError(f"the memory of '{system}' is not known: say --blocks")
        left = ranks * peaks.memory_bytes * engine.memory_ratio - served.weight_bytes - ranks * 2e9
        blocks = int(left // (served.kv_bytes_per_token * BLOCK_TOKENS))
    return Device(
        name=name, given=str(path), system=system, kind="gpu", role=role, ranks=ranks, cost=cost,
        blocks=blocks, basis="measured", source=f"operation tables, {written.get('gpu', system)}",
        link_latency_s=engine.collective_s, link_bytes_per_s=engine.collective_bytes_per_s,
        power_w=peaks.power_w * ranks if peaks and peaks.power_w else None,
        idle_w=peaks.idle_w * ranks if peaks and peaks.idle_w else None,
    )  # fmt: skip


@cache
def _operations(folder: str, served: str, ranks: int, latency_s: float, rate: float) -> Cost:
    return from_operations(
        Path(folder), msgspec.json.decode(served, type=Model), ranks=ranks,
        collective_s=latency_s, collective_bytes_per_s=rate,
    )  # fmt: skip


def _words(path: Path) -> dict[str, Any]:
    """The top-level ``key: word`` lines of a YAML file."""
    if not path.is_file():
        return {}
    found = re.findall(r"^(\w+):[ \t]*(\S[^\n]*?)\s*$", path.read_text("utf-8"), re.MULTILINE)
    return {key: value.strip("'\"") for key, value in found}
