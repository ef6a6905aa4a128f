"""What each device reaches: matrix products by precision, memory, launches, energy, tokens.

Only kernels of the device's own are timed: a precision that torch or OpenVINO would convert is
absent, with the reason. Everything takes turns in rounds (see ``rounds``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec

from mmctl.benchmarks import energy, rounds
from mmctl.benchmarks.intervals import estimate, figure, resolution
from mmctl.benchmarks.products import Product, Target, sized_product, targets, waiter
from mmctl.engine.devices import table
from mmctl.engine.devices.table import PRECISIONS, Figure
from mmctl.engine.errors import MmctlError, UsageError, suggestion
from mmctl.engine.records import SCHEMA, Basis

Progress = Callable[[str, float], None]

_SECONDS = 60.0
_QUICK_SECONDS = 7.0
_ENERGY_S = 2.0
"""Work is repeated for so long around an energy counter, which may move every 100 ms only."""

TOKEN_BATCHES = (1, 4, 16)
TOKEN_CONTEXT = 512
FRAME_SIDE = 224


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One device at one precision. ``achieved_ratio`` is of the published (or, for a processor,
    modelled) peak; ``power_w`` is drawn during the matrix product. What is None has its reason
    in ``absent``. The figures of memory, launches, frames and tokens are the device's, the same
    at every precision; tokens and frames run in float32."""

    device: str
    name: str
    precision: str
    flops_per_s: float | None = None
    flops_per_s_low: float | None = None
    flops_per_s_high: float | None = None
    matrix_side: int | None = None
    bandwidth_bytes_per_s: float | None = None
    bandwidth_bytes_per_s_low: float | None = None
    bandwidth_bytes_per_s_high: float | None = None
    copy_bytes_per_s: float | None = None
    launch_s: float | None = None
    frame_s: float | None = None
    peak_flops_per_s: float | None = None
    peak_bandwidth_bytes_per_s: float | None = None
    peak_basis: Basis | None = None
    peak_source: str | None = None
    achieved_ratio: float | None = None
    power_w: float | None = None
    tops_per_w: float | None = None
    energy_source: str | None = None
    tokens_per_s: list[dict[str, float]] = []
    joules_per_token: list[dict[str, float]] = []
    memory_bytes: int | None = None
    basis: Basis = "measured"
    absent: dict[str, str] = {}


def measure(
    wanted: Sequence[str] = (), threads: int = 1, quick: bool = False,
    progress: Progress = lambda what, share: None,
) -> dict[str, Any]:  # fmt: skip
    """The document of ``mmctl benchmark device``; ``wanted`` names devices, all when empty.

    UsageError for a device that is not here.
    """
    import torch

    from mmctl.benchmarks import openvino
    from mmctl.benchmarks.environment import environment

    torch.set_num_threads(threads)
    here = environment()
    least = resolution(here.busy_ratio)
    found, absent = targets()
    others, why = openvino.names()
    absent |= why
    known = [target.id for target in found] + others
    for name in wanted:
        if name not in known:
            raise UsageError(
                f"no device '{name}' here: {', '.join(known)}{suggestion(name, known)}"
            )
    chosen = [target for target in found if not wanted or target.id in wanted]
    chosen_others = [name for name in others if not wanted or name in wanted]
    parts = len(chosen) + len(chosen_others)
    budget_s = (_QUICK_SECONDS if quick else _SECONDS) / max(1, parts)
    rows: list[Row] = []
    figures: list[dict[str, Any]] = []
    for number, target in enumerate(chosen):

        def tell(what: str, share: float, n: int = number, t: Target = target) -> None:
            progress(f"{t.id}: {what}", (n + share) / parts)

        with torch.inference_mode():
            more, measured = _device(target, threads, budget_s, quick, least, tell)
        rows += more
        figures += measured
    for number, name in enumerate(chosen_others, len(chosen)):
        progress(name, number / parts)
        for result in openvino.measure(name, threads, budget_s, quick):
            rows.append(_openvino_row(result, least))
            if result.blocks:
                rates = [result.operations / block for block in result.blocks]
                figures.append(
                    figure(f"{name}/{result.precision}/flops_per_s", rates, "higher", least)
                )
    return {
        "schema": SCHEMA, "benchmark": "device", "environment": msgspec.to_builtins(here),
        "notes": list(here.remarks), "absent": absent, "devices": msgspec.to_builtins(rows),
        "figures": figures,
    }  # fmt: skip


def _openvino_row(result: Any, least: float) -> Row:
    """What OpenVINO measured: matrix products only."""
    reason = "matrix products only are measured through OpenVINO"
    absent = dict.fromkeys(
        ("bandwidth_bytes_per_s", "launch_s", "frame_s", "joules_per_token", "power_w",
         "tops_per_w", "peak_flops_per_s", "achieved_ratio"), reason,
    )  # fmt: skip
    if not result.blocks:
        absent["flops_per_s"] = result.reason
        return Row(device=result.device, name=result.name, precision=result.precision,
                   absent=absent)  # fmt: skip
    rate = estimate([result.operations / block for block in result.blocks], least)
    return Row(
        device=result.device, name=result.name, precision=result.precision,
        flops_per_s=rate.value, flops_per_s_low=rate.low, flops_per_s_high=rate.high,
        matrix_side=result.side, absent=absent,
    )  # fmt: skip


def _device(
    target: Target,
    threads: int,
    budget_s: float,
    quick: bool,
    least: float,
    progress: Progress,
) -> tuple[list[Row], list[dict[str, Any]]]:
    """All rows of one torch device, and its figures for comparison."""
    wait = waiter(target.torch_device)
    products: dict[str, Product] = {}
    reasons: dict[str, str] = {}
    peaks, peak_reason = _peaks(target, threads)
    for precision in PRECISIONS:
        progress(f"sizes for {precision}", 0.0)
        made = sized_product(target, precision, wait, quick)
        if isinstance(made, str):
            reasons[precision] = made
        else:
            products[precision] = made
    cases = [rounds.Case(f"{p} product", one.call, wait) for p, one in products.items()]
    extra, arrays = _others(target, quick)
    tokens = dict(_tokens(target))
    cases += [rounds.Case(name, call, wait) for name, call in {**extra, **tokens}.items()]
    blocks = rounds.run(cases, budget_s, progress)
    meter, meter_reason = energy.meter(
        target.torch_device.split(":")[0], int(target.torch_device.partition(":")[2] or 0)
    )
    joules = {} if meter is None else {
        case.name: _joules(case, meter) for case in cases
        if "product" in case.name or case.name in tokens
    }  # fmt: skip
    if meter is not None:
        meter.stop()
    shared = _shared(target, blocks, arrays, joules, tokens, least)
    rows = [
        _row(target, precision, products.get(precision), blocks, joules, shared, peaks,
             {"flops_per_s": reasons.get(precision, ""), "peak": peak_reason,
              "energy": meter_reason}, meter, least)
        for precision in PRECISIONS
    ]  # fmt: skip
    return rows, list(_figures(target, products, blocks, arrays, least))


def _others(
    target: Target, quick: bool
) -> tuple[dict[str, Callable[[], object]], dict[str, float]]:
    """Copy, triad, the smallest launch and one frame; and the bytes that the first two move."""
    import torch

    from mmctl.engine.model import build

    device = target.torch_device
    cpu = device == "cpu"
    size = (32 << 20) if cpu else (64 << 20)  # elements of 4 bytes: several last-level caches
    if cpu and quick:
        size >>= 1
    a, b = torch.ones(size, device=device), torch.ones(size, device=device)
    c, one = torch.ones(size, device=device), torch.zeros(1, device=device)
    vlm = build(device=device)
    image = torch.rand(1, 3, FRAME_SIDE, FRAME_SIDE, device=device)
    calls: dict[str, Callable[[], object]] = {
        "copy": lambda: a.copy_(b),
        "triad": lambda: torch.add(b, c, alpha=3.0, out=a),
        "launch": lambda: one.add_(1),
        "frame": lambda: vlm.encode(image),
    }
    return calls, {"copy": 8.0 * size, "triad": 12.0 * size}


def _tokens(target: Target) -> Iterator[tuple[str, Callable[[], object]]]:
    """A decode step of the demo's decoder at each batch."""
    import torch

    from mmctl.benchmarks.stages import BatchCache, decode_step
    from mmctl.engine.model import build

    vlm = build(device=target.torch_device)
    for batch in TOKEN_BATCHES:
        ids = torch.zeros(batch, dtype=torch.long, device=target.torch_device)
        cache = BatchCache(vlm.config, batch, TOKEN_CONTEXT, target.torch_device)
        yield f"decode {batch}", lambda i=ids, c=cache: decode_step(vlm, i, c)  # type: ignore[misc]


def _joules(case: rounds.Case, meter: energy.Meter) -> tuple[float, float]:
    """Energy of one call, and mean power meanwhile."""
    import time

    case.call()
    case.wait()
    before, begun, calls = meter.joules(), time.perf_counter(), 0
    while (took_s := time.perf_counter() - begun) < _ENERGY_S:
        case.call()
        case.wait()
        calls += 1
    used = meter.joules() - before
    return used / calls, used / took_s


def _peaks(target: Target, threads: int) -> tuple[dict[str, Figure], str]:
    """Published peaks of the device, or of its instruction sets; and why there is none."""
    import torch

    published = table.find(target.name)
    if target.torch_device != "cpu":
        if published is None:
            return {}, f"'{target.name}' is not in the table of published figures"
        return {**published.rates, "bandwidth": published.bandwidth}, ""
    # A published peak is of the whole processor, what is measured of its threads here.
    vendor, family, clock_hz = _processor()
    rates = table.processor_rates(torch.cpu.get_capabilities(), vendor, family, threads, clock_hz)
    return rates, "the clock or the width of this processor's units is not known here"


def _processor() -> tuple[str, int, float | None]:
    """Vendor, family and the highest clock that the kernel tells of."""
    from pathlib import Path

    vendor, family, clock_hz = "", 0, None
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            name, _, value = (part.strip() for part in line.partition(":"))
            if name == "vendor_id":
                vendor = value
            elif name == "cpu family":
                family = int(value)
            elif name == "cpu MHz" and clock_hz is None:
                clock_hz = float(value) * 1e6
        highest = Path("/sys/devices/system/cpu/cpu0/cpufreq/cpuinfo_max_freq")
        if highest.is_file():
            clock_hz = int(highest.read_text()) * 1e3
    except (OSError, ValueError):
        pass
    return vendor, family, clock_hz


def _shared(
    target: Target, blocks: dict[str, list[float]], arrays: dict[str, float],
    joules: dict[str, tuple[float, float]], tokens: dict[str, Any], least: float,
) -> dict[str, Any]:  # fmt: skip
    """The device's figures that do not depend on the precision."""
    import torch

    triad = estimate([arrays["triad"] / block for block in blocks["triad"]], least)
    steps = [(int(name.split()[1]), name) for name in tokens]
    memory = None
    if target.torch_device.startswith("cuda"):
        memory = int(torch.cuda.get_device_properties(target.torch_device).total_memory)
    elif target.torch_device == "cpu":
        import psutil

        memory = int(psutil.virtual_memory().total)
    return {
        "bandwidth_bytes_per_s": triad.value, "bandwidth_bytes_per_s_low": triad.low,
        "bandwidth_bytes_per_s_high": triad.high,
        "copy_bytes_per_s": arrays["copy"] / estimate(blocks["copy"]).value,
        "launch_s": estimate(blocks["launch"]).value, "frame_s": estimate(blocks["frame"]).value,
        "tokens_per_s": [
            {"batch": batch, "tokens_per_s": batch / estimate(blocks[name]).value}
            for batch, name in steps
        ],
        "joules_per_token": [
            {"batch": batch, "joules_per_token": joules[name][0] / batch}
            for batch, name in steps if name in joules
        ],
        "memory_bytes": memory,
    }  # fmt: skip


def _row(
    target: Target, precision: str, product: Product | None, blocks: dict[str, list[float]],
    joules: dict[str, tuple[float, float]], shared: dict[str, Any], peaks: dict[str, Figure],
    reasons: dict[str, str], meter: energy.Meter | None, least: float,
) -> Row:  # fmt: skip
    absent = {}
    peak = peaks.get(precision)
    values: dict[str, Any] = {}
    if product is None:
        absent["flops_per_s"] = reasons["flops_per_s"]
    else:
        times = blocks[f"{precision} product"]
        rate = estimate([product.operations / block for block in times], least)
        values |= {
            "flops_per_s": rate.value, "flops_per_s_low": rate.low, "flops_per_s_high": rate.high,
            "matrix_side": product.side,
        }  # fmt: skip
    if peak is not None and peak.basis == "modelled" and values.get("flops_per_s", 0) > peak.value:
        absent["peak_flops_per_s"] = (
            f"the product is faster than {peak.source}: the clock is above what the kernel tells"
        )
        peak = None
    elif peak is None:
        absent["peak_flops_per_s"] = reasons["peak"] if not peaks else f"none for {precision}"
    if peak is not None:
        values |= {
            "peak_flops_per_s": peak.value, "peak_basis": peak.basis, "peak_source": peak.source,
        }  # fmt: skip
        if product is not None:
            values["achieved_ratio"] = min(values["flops_per_s"] / peak.value, 1.0)
    if "achieved_ratio" not in values:
        absent["achieved_ratio"] = (
            absent.get("flops_per_s") or absent.get("peak_flops_per_s") or "no peak"
        )
    if bandwidth := peaks.get("bandwidth"):
        values["peak_bandwidth_bytes_per_s"] = bandwidth.value
    else:
        absent["peak_bandwidth_bytes_per_s"] = "no published figure for this machine's memory"
    if meter is None:
        absent |= dict.fromkeys(("power_w", "tops_per_w", "joules_per_token"), reasons["energy"])
    elif product is not None:
        power_w = joules[f"{precision} product"][1]
        values |= {"power_w": power_w, "energy_source": meter.source}
        if power_w > 0:
            values["tops_per_w"] = values["flops_per_s"] / 1e12 / power_w
    else:
        absent |= dict.fromkeys(("power_w", "tops_per_w"), absent["flops_per_s"])
    if shared["memory_bytes"] is None:
        absent["memory_bytes"] = "not asked of this kind of device"
    return Row(
        device=target.id, name=target.name, precision=precision, absent=absent,
        **shared, **values,
    )  # fmt: skip


def _figures(
    target: Target, products: dict[str, Product], blocks: dict[str, list[float]],
    arrays: dict[str, float], least: float,
) -> Iterator[dict[str, Any]]:  # fmt: skip
    """Everything measured of a device, as ``benchmark compare`` reads it."""
    for precision, product in products.items():
        rates = [product.operations / block for block in blocks[f"{precision} product"]]
        yield figure(f"{target.id}/{precision}/flops_per_s", rates, "higher", least)
    for name, moved in arrays.items():
        rates = [moved / block for block in blocks[name]]
        yield figure(f"{target.id}/{name}_bytes_per_s", rates, "higher", least)
    for name in ("launch", "frame"):
        yield figure(f"{target.id}/{name}_s", blocks[name], least=least)
    for batch in TOKEN_BATCHES:
        rates = [batch / block for block in blocks[f"decode {batch}"]]
        yield figure(f"{target.id}/batch {batch}/tokens_per_s", rates, "higher", least)


def published() -> dict[str, Any]:
    """The table of published figures as a document; nothing is measured."""
    rows = []
    for device in table.table().values():
        for precision, rate in device.rates.items():
            rows.append(
                {
                    "device": device.key, "name": device.name, "precision": precision,
                    "peak_flops_per_s": rate.value, "source": rate.source,
                    "peak_bandwidth_bytes_per_s": device.bandwidth.value,
                    "bandwidth_source": device.bandwidth.source,
                    "power_w": device.power.value, "power_source": device.power.source,
                    "peak_tops_per_w": rate.value / 1e12 / device.power.value,
                    "claimed_flops_per_s": _value(device.claimed.get(precision)),
                    "claimed_tops_per_w": _value(device.claimed.get("tops_per_w"))
                    if precision == "int8" else None,
                    "basis": "published",
                }
            )  # fmt: skip
    if not rows:
        raise MmctlError("the table of published figures is empty")
    return {"schema": SCHEMA, "benchmark": "published", "devices": rows}


def _value(figure_: Figure | None) -> float | None:
    return None if figure_ is None else figure_.value
