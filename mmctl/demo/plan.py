"""What the next step would allocate, known before it runs.

Each stage is run once per shape on ``meta`` tensors under the same tracker; its tape of
allocations and releases is then replayed on a copy of the pool. A decode is taped for the
next multiple of 16 tokens: its scores are that many 512-byte blocks, whatever lies between.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import msgspec
import torch
from torch.utils._python_dispatch import _disable_current_modes

from mmctl.agent import tracker as trackers
from mmctl.agent.tracker import Label, Tracker, labelled
from mmctl.engine import folders
from mmctl.engine import model as models
from mmctl.engine.model import Config, KvCache, VisionLanguageModel, build, in_float32

DECODE_ROUNDING_TOKENS = 16


class Step(NamedTuple):
    """One entry of a tape: ``size_bytes`` are allocated for ``slot``, or with 0 it is freed.

    A negative slot is storage that was there before: ``-1 - 2 * layer`` the keys of a layer of
    the KV cache, ``-2 - 2 * layer`` its values.
    """

    slot: int
    size_bytes: int


Tape = tuple[Step, ...]


class _TapeSink:
    """Writes down what a tracker reports, with slots in place of storage keys."""

    def __init__(self) -> None:
        self.steps: list[Step] = []
        self.slots: dict[int, int] = {}
        self.next_slot = 0
        self.existing: int | None = None

    def alloc(self, key: int, size_bytes: int, label: Label, address: int) -> None:
        if self.existing is not None:
            self.slots[key] = self.existing
            return
        self.slots[key] = self.next_slot
        self.steps.append(Step(self.next_slot, size_bytes))
        self.next_slot += 1

    def free(self, key: int) -> None:
        self.steps.append(Step(self.slots.pop(key), 0))


class Tapes:
    """Tapes of the stages of one model configuration, each made once per shape.

    ``kept`` names a file that other processes share: a tape costs 20 to 50 ms, and thousands of
    seeds need thousands of them. Without it the ``most`` latest are kept: a server that runs for
    days meets prompts of every length.
    """

    def __init__(self, config: Config, kept: Path | None = None, most: int = 256) -> None:
        self.model: VisionLanguageModel = build(config, device="meta")
        self._kept, self._most = kept, most
        self._made = OrderedDict({} if kept is None else _read(kept))

    def encode(self, side: int, images_per_session: tuple[int, ...], light: bool = False) -> Tape:
        """Encoding a batch of square images of ``side`` pixels, vision keys and values kept."""
        key = (2 if light else 0, side, *images_per_session)
        if key not in self._made:
            with _disable_current_modes():
                self._keep(key, self._tape_encode(side, images_per_session, light))
        return self._made[key]

    def decode(self, new: int, past: int, capacity: int, vision_tokens: int) -> Tape:
        """Running ``new`` tokens behind ``past`` cached ones, storage for ``capacity`` held."""
        if new == 1 and past < capacity:
            past = -(-(past + 1) // DECODE_ROUNDING_TOKENS) * DECODE_ROUNDING_TOKENS - 1
        key = (1, new, past, capacity, vision_tokens)
        if key not in self._made:
            with _disable_current_modes():
                self._keep(key, self._tape_decode(new, past, capacity, vision_tokens))
        return self._made[key]

    def _keep(self, key: tuple[int, ...], tape: Tape) -> None:
        self._made[key] = tape
        if self._kept is None:
            if len(self._made) > self._most:
                self._made.popitem(last=False)
        else:
            line = msgspec.json.encode((key, tape)) + b"\n"
            with self._kept.open("ab", buffering=0) as file:
                file.write(line)

    @torch.inference_mode()
    def _tape_encode(self, side: int, images_per_session: tuple[int, ...], light: bool) -> Tape:
        sink = _TapeSink()
        images = [torch.empty(3, side, side, device="meta")] * sum(images_per_session)
        with Tracker(sink, "meta") as tracker, labelled("vision", "plan"):
            self._adopt(tracker, sink)
            holders = ["plan"] * len(images_per_session)
            kept = encode_batch(self.model, images, images_per_session, holders, light)
            tape = tuple(sink.steps)
        del kept
        return tape

    @torch.inference_mode()
    def _tape_decode(self, new: int, past: int, capacity: int, vision_tokens: int) -> Tape:
        config, sink = self.model.config, _TapeSink()
        cache = KvCache(config, "meta")
        ids = torch.empty(new, dtype=torch.int64, device="meta")
        pair = torch.empty(2, vision_tokens, config.text_dim, dtype=torch.float16, device="meta")
        with Tracker(sink, "meta") as tracker, labelled("text", "plan"):
            self._adopt(tracker, sink)
            for tensor in (ids, pair):
                sink.existing = -(1 << 30)
                tracker.see(tensor)
            for layer in range(config.text_layers):
                for which, kept in enumerate((cache.keys, cache.values)):
                    sink.existing = -1 - 2 * layer - which
                    kept[layer] = torch.empty(capacity, config.text_dim, device="meta")
            cache.length, sink.existing = past, None
            sink.steps.clear()
            cross = in_float32([pair] * config.text_layers) if vision_tokens else None
            logits = self.model.decode(ids, cache, cross)
            del logits
            tape = tuple(sink.steps)
        return tape

    def _adopt(self, tracker: Tracker, sink: _TapeSink) -> None:
        sink.existing = -(1 << 30)
        for parameter in self.model.parameters():
            tracker.see(parameter)
        sink.existing = None


def kept_tapes(config: Config) -> Path | None:
    """The file of tapes for this model as this version runs it; None where none can be kept."""
    made_by = hashlib.sha256(repr((config, torch.__version__)).encode())
    for module in (models, trackers):
        made_by.update(Path(module.__file__ or "").read_bytes())
    made_by.update(Path(__file__).read_bytes())
    folder = folders.cache() / "tapes"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{made_by.hexdigest()[:16]}.ndjson"
        path.touch()
    except OSError:
        return None
    return path


def _read(path: Path) -> dict[tuple[int, ...], Tape]:
    """The tapes in a file; a line that another process is still writing is left out."""
    found: dict[tuple[int, ...], Tape] = {}
    decoder = msgspec.json.Decoder(tuple[tuple[int, ...], tuple[Step, ...]])
    for line in path.read_bytes().splitlines():
        with suppress(msgspec.DecodeError):
            key, tape = decoder.decode(line)
            found[key] = tape
    return found


def encode_batch(
    model: VisionLanguageModel,
    images: list[torch.Tensor],
    images_per_session: tuple[int, ...],
    holders: list[str],
    light: bool = False,
) -> tuple[torch.Tensor, list[list[torch.Tensor]]]:
    """Vision tokens ``[images, patches, text_dim]``, and per session its vision keys and values
    by layer; ``holders`` names the sessions, ``light`` the smaller vision branch."""
    with labelled("vision", "batch"):
        tokens = model.encode(torch.stack(images).to(model.head.weight.device), light)
    sessions, start = [], 0
    for count, holder in zip(images_per_session, holders, strict=True):
        with labelled("vision", holder):
            sessions.append(model.cross_cache(tokens[start : start + count].flatten(0, 1)))
        start += count
    return tokens, sessions
