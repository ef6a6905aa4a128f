"""What a step costs on a device: tables of seconds, measured per operation or from peak figures.

A cost has four tables: ``dense_s[tokens]`` (all layers' matrix products, norms, activations and
collectives), ``head_s[sequences]`` (logits and sampling), ``attention_s`` over chunk, context
before it, decoding sequences and their mean context, ``encode_s`` over images and patches.
"""

from __future__ import annotations

import csv
from collections import defaultdict
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from mmctl.engine.errors import MmctlError
from mmctl.engine.records import Basis
from mmctl.engine.schedule.layout import CHUNKS, CONTEXTS, IMAGES, PATCHES, SEQUENCES

TOKENS_MOST = 16384
SEQUENCES_MOST = 1024

_PER_LAYER = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj", "act_fn", "rotary_emb", "qk_norm")
_TWICE_A_LAYER = ("layernorm",)
_ONCE = ("embedding", "final_layernorm")


class Model(msgspec.Struct, frozen=True, kw_only=True):
    """The shape of a vision-language model; the ``vision_`` fields are 0 for one of text."""

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int
    vision_layers: int = 0
    vision_hidden: int = 0
    vision_heads: int = 0
    vision_intermediate: int = 0
    patches_per_token: int = 4
    bytes_per_value: int = 2

    @property
    def kv_bytes_per_token(self) -> int:
        """Keys and values of one token in all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim * self.bytes_per_value

    @property
    def layer_values(self) -> int:
        """Weights of one decoder layer: attention, and a gated perceptron."""
        attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        return attention + 3 * self.hidden * self.intermediate

    @property
    def weight_bytes(self) -> int:
        """Decoder, embedding and head."""
        return self.bytes_per_value * (
            self.layers * self.layer_values + 2 * self.hidden * self.vocabulary
        )

    @property
    def vision_layer_values(self) -> int:
        """Weights of one vision layer: attention, and a plain perceptron."""
        return 4 * self.vision_hidden**2 + 2 * self.vision_hidden * self.vision_intermediate

    @property
    def vision_weight_bytes(self) -> int:
        """Of the whole vision encoder."""
        return self.bytes_per_value * self.vision_layers * self.vision_layer_values


class Peaks(msgspec.Struct, frozen=True, kw_only=True):
    """Peak figures of a device, dense tensor-core figures at half precision, and their source.

    ``compute_ratio`` and ``bandwidth_ratio`` are the shares of the peaks that kernels reach,
    ``kernel_s`` the least time of one kernel.
    """

    name: str
    kind: str
    flops_per_s: float
    bandwidth_bytes_per_s: float
    memory_bytes: int
    power_w: float | None = None
    idle_w: float | None = None
    link_bytes_per_s: float = 32e9
    link_latency_s: float = 10e-6
    compute_ratio: float = 0.6
    bandwidth_ratio: float = 0.8
    kernel_s: float = 3e-6
    basis: Basis = "published"
    source: str = ""


class Cost(msgspec.Struct, frozen=True, kw_only=True):
    """The tables of one model on one kind of device, and what they rest on."""

    dense_s: Any
    head_s: Any
    attention_s: Any
    encode_s: Any
    basis: Basis
    source: str


def from_peaks(model: Model, peaks: Peaks) -> Cost:
    """A roofline: each operation takes the larger of its compute and its memory time."""
    flops = peaks.flops_per_s * peaks.compute_ratio
    bandwidth = peaks.bandwidth_bytes_per_s * peaks.bandwidth_ratio
    tokens = np.arange(TOKENS_MOST + 1, dtype=float)
    width = model.bytes_per_value

    def products(count: np.ndarray, values: float, activation: float, layers: int) -> np.ndarray:
        compute = 2.0 * count * values / flops
        memory = (values * width + count * activation * width) / bandwidth
        return layers * (np.maximum(compute, memory) + 8 * peaks.kernel_s)

    activation = 2 * model.hidden + 3 * model.intermediate
    dense = products(tokens, model.layer_values, activation, model.layers)
    sequences = np.arange(SEQUENCES_MOST + 1, dtype=float)
    head = products(sequences, model.hidden * model.vocabulary, model.vocabulary, 1)
    head[0] = 0.0
    chunk = np.array(CHUNKS, float)[:, None, None, None]
    before = np.array(CONTEXTS, float)[None, :, None, None]
    count = np.array(SEQUENCES, float)[None, None, :, None]
    context = np.array(CONTEXTS, float)[None, None, None, :]
    kv = model.kv_bytes_per_token
    pairs = chunk * (before + chunk / 2)
    prefill = np.maximum(
        4.0 * pairs * model.heads * model.head_dim * model.layers / flops,
        (before + chunk) * (chunk > 0) * kv / bandwidth,
    )
    decode = np.maximum(
        4.0 * count * context * model.heads * model.head_dim * model.layers / flops,
        count * context * kv / bandwidth,
    )
    launch = model.layers * peaks.kernel_s * ((chunk > 0) * 1.0 + (count > 0) * 1.0)
    attention = prefill + decode + launch
    source = f"roofline of {peaks.name}'s peaks ({peaks.source})"
    return Cost(
        dense_s=dense, head_s=head, attention_s=attention.ravel(), encode_s=encoder(model, peaks),
        basis="modelled", source=source,
    )  # fmt: skip


def encoder(
    model: Model, peaks: Peaks, measured: dict[tuple[int, int], float] | None = None
) -> Any:
    """Seconds to encode images by patches each, flat over IMAGES × PATCHES.

    Attention is ``measured`` per layer, by (images, patches), or the roofline's; the products
    are the roofline's, on a device that fills up with patches: small batches leave it idle.
    """
    images = np.array(IMAGES, float)[:, None]
    patches = np.array(PATCHES, float)[None, :]
    if not model.vision_layers:
        return np.zeros(images.size * patches.size)
    flops = peaks.flops_per_s * peaks.compute_ratio
    bandwidth = peaks.bandwidth_bytes_per_s * peaks.bandwidth_ratio
    tokens = images * patches
    values, width = model.vision_layer_values, model.bytes_per_value
    products = np.maximum(
        2.0 * tokens * values / flops,
        (values + tokens * (6 * model.vision_hidden + 2 * model.vision_intermediate))
        * width / bandwidth,
    )  # fmt: skip
    attention = np.maximum(
        4.0 * images * patches**2 * model.vision_hidden / flops,
        4.0 * tokens * model.vision_hidden * width / bandwidth,
    )
    if measured:
        attention = _measured_attention(measured)
    per_layer = products + attention + 10 * peaks.kernel_s
    return (model.vision_layers * per_layer).ravel()


def _measured_attention(measured: dict[tuple[int, int], float]) -> np.ndarray:
    """Measured seconds a layer at the grid's points: linear in patches squared between them."""
    table = np.empty((len(IMAGES), len(PATCHES)))
    batches = sorted({images for images, _ in measured})
    for i, count in enumerate(IMAGES):
        near = min(batches, key=lambda b: abs(b - count))
        rows = sorted((p, s) for (b, p), s in measured.items() if b == near)
        x, y = np.array(rows, float).T
        found = np.interp(PATCHES, x, y)
        beyond = np.array(PATCHES) > x[-1]
        found[beyond] = y[-1] * (np.array(PATCHES)[beyond] / x[-1]) ** 2
        table[i] = found * (count / near)
    return table


def from_operations(
    folder: Path, model: Model, *, ranks: int = 1, collective_s: float = 0.0,
    collective_bytes_per_s: float = float("inf"), peaks: Peaks | None = None,
) -> Cost:  # fmt: skip
    """Tables measured operation by operation: ``dense.csv``, ``per_sequence.csv`` and
    ``attention.csv`` of one layer, times in µs.

    The tables hold no collectives: two all-reduces a layer are added where there are ``ranks``,
    ``collective_s`` + bytes / ``collective_bytes_per_s`` each.
    """
    layers = model.layers
    dense_by = _by_size(folder / "dense.csv")
    tokens = np.arange(TOKENS_MOST + 1, dtype=float)
    dense = np.zeros_like(tokens)
    for name, rows in dense_by.items():
        times = layers if name in _PER_LAYER else 2 * layers if name in _TWICE_A_LAYER else 1
        if name not in (*_PER_LAYER, *_TWICE_A_LAYER, *_ONCE):
            raise MmctlError(f"{folder / 'dense.csv'}: unknown layer '{name}'")
        dense += times * _interpolate(tokens, rows)
    if ranks > 1:
        size = tokens * model.hidden * model.bytes_per_value * 2 * (ranks - 1) / ranks
        dense += 2 * layers * (collective_s + size / collective_bytes_per_s)
    sequences = np.arange(SEQUENCES_MOST + 1, dtype=float)
    head = np.zeros_like(sequences)
    for rows in _by_size(folder / "per_sequence.csv").values():
        head += _interpolate(sequences, rows)
    head[0] = 0.0
    encode = encoder(model, peaks) if peaks else np.zeros(len(IMAGES) * len(PATCHES))
    return Cost(
        dense_s=dense, head_s=head, attention_s=layers * _attention(folder / "attention.csv"),
        encode_s=encode, basis="measured", source=f"operation tables of {folder.name}",
    )  # fmt: skip


def _rows(path: Path) -> list[list[str]]:
    try:
        with open(path, newline="", encoding="utf-8") as file:
            return [row for row in list(csv.reader(file))[1:] if row]
    except OSError as error:
        raise MmctlError(f"cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise MmctlError(f"{path} is no table of operations") from None


def _by_size(path: Path) -> dict[str, list[tuple[int, float]]]:
    found: dict[str, list[tuple[int, float]]] = defaultdict(list)
    try:
        for name, size, time_us in _rows(path):
            found[name].append((int(size), float(time_us) * 1e-6))
    except ValueError as error:
        raise MmctlError(f"{path}: {error}") from None
    return {name: sorted(rows) for name, rows in found.items()}


def _interpolate(at: np.ndarray, rows: list[tuple[int, float]]) -> np.ndarray:
    """Linear between the points, and on past the last two."""
    x, y = np.array(rows, float).T
    found = np.interp(at, x, y)
    if len(x) > 1:
        beyond = at > x[-1]
        slope = max(0.0, (y[-1] - y[-2]) / (x[-1] - x[-2]))
        found[beyond] = y[-1] + slope * (at[beyond] - x[-1])
    return found


def _attention(path: Path) -> np.ndarray:
    """Seconds of one layer's attention on the common grid; what was not measured goes on from
    the two cells before it."""
    table = np.full((len(CHUNKS), len(CONTEXTS), len(SEQUENCES), len(CONTEXTS)), np.nan)
    axes = (CHUNKS, CONTEXTS, SEQUENCES, CONTEXTS)
    index = [{value: i for i, value in enumerate(axis)} for axis in axes]
    try:
        for *where, time_us in _rows(path):
            at = [place.get(int(value)) for place, value in zip(index, where, strict=True)]
            if None not in at:
                table[tuple(at)] = float(time_us) * 1e-6
    except ValueError as error:
        raise MmctlError(f"{path}: {error}") from None
    table[0, 0, 0, 0] = 0.0
    table[0, 1:] = table[0, :1]
    table[:, :, 0, 1:] = table[:, :, 0, :1]
    table[:, :, 1:, 0] = table[:, :, 1:, 1]
    for axis in (3, 1, 2, 0):
        _continue(table, axis, np.array(axes[axis], float))
    if np.isnan(table).any():
        raise MmctlError(f"{path} does not cover chunks, contexts and sequences by doubling")
    return table.ravel()


def _continue(table: np.ndarray, axis: int, grid: np.ndarray) -> None:
    moved = np.moveaxis(table, axis, 0)
    for i in range(2, len(grid)):
        missing = np.isnan(moved[i])
        slope = (moved[i - 1] - moved[i - 2]) / (grid[i - 1] - grid[i - 2])
        on = moved[i - 1] + np.maximum(slope, 0.0) * (grid[i] - grid[i - 1])
        moved[i][missing] = on[missing]
