"""Records to draw: a node under a burst of images, made from arithmetic, the same every time."""

from __future__ import annotations

import math
from collections.abc import Iterator

import msgspec

from mmctl.engine.records import (
    AnyRecord,
    Device,
    Event,
    Fits,
    Heat,
    Latencies,
    Link,
    Pool,
    Process,
    Recording,
    Request,
    Serving,
    Span,
)
from mmctl.tui.model import Model
from mmctl.tui.snapshot import Snapshot

MIB = 2**20
GIB = 2**30
START_NS = 1_790_000_000_000_000_000
NODE = "a17"
ROWS = 40


def heat(second: float, rows: int = ROWS, base: int = 0x7F10_0000_0000) -> Heat:
    """A burst of images that walks into the text's addresses and leaves holes behind."""
    cells = []
    kept = []
    ages = []
    pages = []
    burst = 0.5 + 0.5 * math.sin(second / 6)
    for row in range(rows):
        near = math.exp(-(((row - 16 - 6 * math.sin(second / 9)) / 5) ** 2))
        vision = int(20 * MIB * near * burst)
        text = int((20 * MIB - vision) * (0.9 if row > 12 else 0.3))
        other = 2 * MIB if row < 6 else 0
        free = max(0, 20 * MIB - vision - text - other)
        usable = free if row % 3 else free // 5
        if row > 34 and second < 20:
            continue
        mixed = 2 * min(vision, text) / (vision + text) if vision + text else 0.0
        kept.append(row)
        ages.append(0.4 * 2 ** (row / 3) + second / 40 if vision + text + other else None)
        partial = 80 if row % 7 == 3 else 2
        pages.append(((20 * MIB - free) // 4096 - partial, partial, free // 4096))
        cells.append(
            (mixed * (1 - usable / free if free else 1), vision, text, other, free, usable)
        )
    return Heat(base_address=base, row_bytes=20 * MIB, row_count=rows, rows=tuple(kept),
                cells=tuple(cells), age_s=tuple(ages), pages=tuple(pages))  # fmt: skip


def pool(second: float, ts_ns: int, device: str = "gpu0") -> Pool:
    grid = heat(second)
    vision = sum(cell[1] for cell in grid.cells)
    text = sum(cell[2] for cell in grid.cells)
    other = sum(cell[3] for cell in grid.cells)
    free = sum(cell[4] for cell in grid.cells)
    fits = second % 25 < 18
    return Pool(
        ts_ns=ts_ns, node=NODE, device=device, reserved_bytes=vision + text + other + free,
        allocated_bytes=vision + text + other, free_bytes=free, largest_free_bytes=12 * MIB,
        releasable_bytes=30 * MIB, capacity_bytes=ROWS * 20 * MIB, device_free_bytes=91 * MIB,
        fragmentation_ratio=1 - 12 * MIB / free, vision_bytes=vision, text_bytes=text,
        other_bytes=other, conflict_ratio=0.42, headroom_bytes=(40 if fits else -12) * MIB,
        fits=Fits(fits=fits, allocations=61, peak_bytes=56 * MIB,
                  need_bytes=None if fits else 24 * MIB, cause=None if fits else "false_free"),
        vision_tokens=int(700 + 300 * math.sin(second)), text_tokens=5_210, heat=grid,
    )  # fmt: skip


def gpu(second: float, ts_ns: int, index: int) -> Device:
    load = 0.5 + 0.45 * math.sin(second / 4 + index)
    return Device(
        ts_ns=ts_ns, node=NODE, device=f"gpu{index}", kind="gpu", model="H100 80GB",
        sm_ratio=load, bandwidth_ratio=load * 0.7, total_bytes=ROWS * 20 * MIB,
        used_bytes=int((0.4 + 0.3 * load) * ROWS * 20 * MIB), temperature_c=41 + 30 * load,
        power_w=140 + 480 * load, throttle=("sw_power_cap",) if load > 0.8 else (),
        processes=(Process(pid=4711 + index, name="vllm", used_bytes=500 * MIB),),
    )  # fmt: skip


def npu(ts_ns: int) -> Device:
    why = "npu-smi gives no utilisation for this chip"
    return Device(
        ts_ns=ts_ns, node=NODE, device="npu0", kind="npu", model="310P3",
        total_bytes=int(21.5 * GIB),
        used_bytes=int(12.1 * GIB), temperature_c=52.0,
        absent={"sm_ratio": why, "bandwidth_ratio": why, "power_w": "not read on this board"},
    )  # fmt: skip


def engine(second: float, ts_ns: int) -> Serving:
    return Serving(
        ts_ns=ts_ns, node=NODE, engine="vllm", instance=":8000", running=24,
        waiting=int(4 + 4 * math.sin(second / 3)), kv_ratio=0.6 + 0.35 * math.sin(second / 8),
        queue_wait_s=0.18, itl_p99_s=0.038, generation_tokens_per_s=1834.0,
        modalities={"text": Latencies(ttft_p99_s=0.41), "vision": Latencies(ttft_p99_s=2.9)},
    )  # fmt: skip


def decisions() -> list[tuple[float, Event]]:
    """What a breaker and its worker say over half a minute, by second."""

    def event(what: str, **more: object) -> Event:
        return Event(ts_ns=0, node=NODE, device="gpu0", mode="enforce", what=what, **more)  # type: ignore[arg-type]

    def measured(name: str, value: object, threshold: object) -> dict[str, object]:
        return {"name": name, "value": value, "comparison": ">", "threshold": threshold,
                "age_s": 0.02, "basis": "measured", "truth": True}  # fmt: skip

    def step(response: str, freed_mib: int, took_ms: float, fits: bool) -> dict[str, object]:
        return {"response": response, "freed_bytes": freed_mib * MIB,
                "took_ns": int(took_ms * 1e6), "fits": fits}  # fmt: skip

    def check(name: str, value: object, golden: object, tolerance: object) -> dict[str, object]:
        return {"name": name, "value": value, "golden": golden, "tolerance": tolerance,
                "passed": True}  # fmt: skip

    trip = {
        "inputs": [
            measured("fits", False, True),
            measured("need_bytes", 24 * MIB, 12 * MIB),
            measured("fragmentation_ratio", 0.91, 0.65),
        ],
        "when": "not fits",
    }
    answer = {
        "steps": [step("hold_admission", 0, 1.2, False), step("offload_kv", 78, 24.0, True)],
        "fits": True,
        "command": "c1",
    }
    verdict = {
        "verdict": "passed",
        "checks": [
            check("red_circle", "red", "red", "exact"),
            check("digit_seven", "7", "7", "exact"),
            check("image embedding cosine", 0.9997, 1.0, 0.0009),
            check("text BLEU-4 (floor)", 100.0, 100.0, 40.0),
        ],
    }
    told = "need 24 MiB, largest 12 MiB, releasable 30 MiB"
    return [
        (0.5, event("breaker", evidence={"rules": [{"name": "headroom"}]})),
        (1.0, event("state", state="closed")),
        (24.2, event("trip", rule="headroom", state="open", message=told, evidence=trip)),
        (24.23, event("respond", took_ns=31_000_000, evidence=answer)),
        (24.24, event("state", state="verifying")),
        (25.5, event("verify", took_ns=1_250_000_000, evidence=verdict)),
        (
            25.51,
            event(
                "half_open",
                state="half_open",
                evidence={"share": 0.05, "requests_needed": 20, "deadline_s": 60.0},
            ),
        ),
        (29.0, event("close", state="closed", evidence={"completed": 20}, took_ns=4_800_000_000)),
    ]


def burst(seconds: float = 40.0, per_second: int = 10, gpus: int = 2) -> Iterator[AnyRecord]:
    """The whole scene, in order of time."""
    yield Recording(node=NODE, started_ns=START_NS, profile="default", mmctl="0")
    waiting = decisions()
    for tick in range(int(seconds * per_second)):
        second = tick / per_second
        ts_ns = START_NS + int(second * 1e9)
        while waiting and waiting[0][0] <= second:
            at, event = waiting.pop(0)
            yield replace_time(event, START_NS + int(at * 1e9))
        for index in range(gpus):
            yield gpu(second, ts_ns, index)
        yield pool(second, ts_ns)
        if tick % 5 == 0:
            yield npu(ts_ns)
            yield engine(second, ts_ns)
        yield from requests(tick, ts_ns)


def requests(tick: int, ts_ns: int) -> Iterator[Request]:
    """A request every half second, every third with images: queued, admitted, done."""
    for behind, state in ((0, "queued"), (2, "admitted"), (9, "completed")):
        number, rest = divmod(tick - behind, 5)
        if rest or number < 0:
            continue
        images = 2 if number % 3 == 0 else 0
        seconds = {"text_decode_step": 0.5 + number % 7 / 20}
        if images:
            seconds = {
                "vision_encode": 0.21 + number % 5 / 40,
                "cross_attn_fusion": 0.04,
                **seconds,
            }
        yield Request(
            ts_ns=ts_ns, node=NODE, id=f"r{number}", state=state, images=images,
            vision_tokens=1152 if images else 0, text_tokens=512,
            stages=seconds if state == "completed" else {},
        )  # fmt: skip


def links() -> list[Link]:
    """Two GPUs on a switch, an NPU across the sockets."""
    return [
        Link(ts_ns=START_NS, node=NODE, a="gpu0", b="gpu1", link_class="NV18", hops=1,
             latency_us=3.2),
        Link(ts_ns=START_NS, node=NODE, a="gpu0", b="npu0", link_class="SYS", hops=3,
             crosses_numa=True, latency_us=7.9),
        Link(ts_ns=START_NS, node=NODE, a="gpu1", b="npu0", link_class="SYS", hops=3,
             crosses_numa=True, absent={"latency_us": "not measured"}),
    ]  # fmt: skip


def placements() -> list[Event]:
    """Where requests went, and why."""
    return [
        Event(ts_ns=START_NS + i * 10**9, node=NODE, device=f"gpu{i % 2}", what="route",
              evidence={"request": f"r{i}", "weight": 0.31 + i / 50, "others": {"npu0": 0.12}})
        for i in range(4)
    ]  # fmt: skip


def spans() -> list[AnyRecord]:
    """Two ranks, three streams each, and a gather to which rank 1 came late."""
    found: list[AnyRecord] = []
    for rank in range(2):
        for i in range(24):
            at = START_NS + i * 800_000 + rank * 90_000
            for stream, modality, offset, lasts in (
                ("7", "text", 0, 500_000), ("20", "vision", 200_000, 350_000 if i % 3 else 0),
            ):  # fmt: skip
                if lasts:
                    found.append(Span(
                        ts_ns=at + offset, node=f"rank{rank}", device=f"gpu{rank}", stream=stream,
                        name="gemm", kind="kernel", duration_ns=lasts, modality=modality,
                    ))  # fmt: skip
            if i % 6 == 5:
                late = 900_000 if rank == 0 else 150_000
                found.append(Span(
                    ts_ns=at + 1_000_000 - late, node=f"rank{rank}", device=f"gpu{rank}",
                    stream="nccl", name="all_gather", kind="collective", duration_ns=late,
                ))  # fmt: skip
    found.append(Event(
        ts_ns=START_NS + 18_000_000, node="rank1", what="imbalance",
        message="rank 1 came late to all_gather",
        evidence={"late_rank": 1, "waits_s": {"0": 0.0009, "1": 0.00015},
                  "collective": "all_gather"},
    ))  # fmt: skip
    return sorted(found, key=lambda record: record.ts_ns)


def flight() -> list[AnyRecord]:
    """The last second of a fleet: an encoder that feeds two decoders over one busy link."""
    end_ns = START_NS + 40 * 10**9
    found: list[AnyRecord] = [
        Span(ts_ns=end_ns - ago * 10**6, node=NODE, device=device, stream=stage, name=stage,
             stage=stage, kind="batch", duration_ns=lasts * 10**6, modality=modality,
             images=images, requests=requests)
        for ago, device, stage, lasts, modality, images, requests in (
            (900, "gpu0", "vision_encode", 400, "vision", 8, 3),
            (600, "gpu1", "text_decode_step", 400, "text", None, 17),
            (420, "gpu0", "vision_encode", 700, "vision", 12, 5),
            (200, "gpu1", "cross_attn_fusion", 180, "vision", None, 3),
            (190, "gpu1", "text_decode_step", 300, "text", None, 21),
        )
    ]  # fmt: skip
    used = msgspec.structs.replace(links()[0], ts_ns=end_ns, used_bytes_per_s=3.1e9)
    return [*found, used]


def sharing() -> list[Event]:
    """What two pairs of tasks are predicted to cost each other in one cache."""
    return [
        Event(ts_ns=START_NS, what="sharing", evidence={
            "a": a, "b": b, "predicted_extra_misses_ratio": extra, "collision": extra > 0.1,
            "cache": "h100", "basis": "modelled"})
        for a, b, extra in (("vision_encode", "text_prefill", 0.262), ("vision_encode",
                            "text_decode", 0.031))
    ]  # fmt: skip


def replace_time(event: Event, ts_ns: int) -> Event:
    return msgspec.structs.replace(event, ts_ns=ts_ns)


def model_of(seconds: float) -> Model:
    """The model after ``seconds`` of the burst scene."""
    model = Model()
    for record in burst(seconds):
        model.add(record)
    return model


def snapshot_of(seconds: float) -> Snapshot:
    """What the screen shows after ``seconds`` of the burst scene."""
    return model_of(seconds).snapshot()
