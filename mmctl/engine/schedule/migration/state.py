"""What a frozen decode is: graph, weights, KV cache, vision tokens, sampler. And as a file.

The file is in the safetensors format: the length of a JSON header, the header, the tensors. It
can hold nothing but numbers and text, so that a stranger's cannot execute; ours is in the
header's metadata under ``mmctl_decode``.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from mmctl.engine import atomic
from mmctl.engine.errors import MmctlError
from mmctl.engine.schedule.migration.graph import Graph
from mmctl.engine.untrusted import RefusedError

if TYPE_CHECKING:
    from numpy import ndarray

HEADER_MOST = 16 << 20
_MEANING = "mmctl_decode"
_DTYPES = {
    "F32": "<f4", "F16": "<f2", "F64": "<f8", "I64": "<i8", "I32": "<i4", "U8": "|u1",
}  # fmt: skip


class Sampler(msgspec.Struct, frozen=True, kw_only=True):
    """How the next token is chosen: the most likely one at ``temperature`` 0, else drawn.

    The n-th draw is a function of ``seed`` and n alone (Philox, a counter-based generator:
    Salmon et al. 2011), so that these numbers are the generator's whole state.
    """

    temperature: float = 0.0
    seed: int = 0
    drawn: int = 0

    def draw(self, logits: ndarray) -> tuple[int, Sampler]:
        """The token for ``logits`` ``[vocabulary]``, and the sampler for the next one."""
        import numpy as np

        after = msgspec.structs.replace(self, drawn=self.drawn + 1)
        if self.temperature == 0:
            return int(logits.argmax()), after
        scaled = logits.astype(np.float64) / self.temperature
        weights = np.exp(scaled - scaled.max())
        source = np.random.Generator(np.random.Philox(key=self.seed, counter=self.drawn))
        share = source.random() * weights.sum()
        token = int(np.searchsorted(weights.cumsum(), share, side="right"))
        return min(token, len(weights) - 1), after


class Position(msgspec.Struct, frozen=True, kw_only=True):
    """Where a decode stands between two steps.

    The cache holds ``past`` tokens; ``token``, number ``index`` of those made, is the next that a
    step runs. ``last`` is the step before, for a check elsewhere: its ``past`` and its token.
    """

    past: int
    token: int
    index: int
    sampler: Sampler
    last: tuple[int, int] | None = None


class Frozen(msgspec.Struct, frozen=True, kw_only=True):
    """A decode at rest; no device, no address.

    ``cache`` is ``[2 * layers, past, width]`` float32, the keys of all layers first; ``cross``
    one ``[2, vision tokens, width]`` float16 a layer, or nothing; ``logits`` those of the step
    ``position.last``.
    """

    graph: Graph
    weights: dict[str, Any]
    position: Position
    cache: Any
    cross: list[Any]
    logits: Any


class _Meaning(msgspec.Struct, frozen=True, kw_only=True):
    graph: Graph
    position: Position


class _Entry(msgspec.Struct, frozen=True):
    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


def save(frozen: Frozen, path: Path) -> int:
    """Write ``frozen`` to ``path``, whole or not at all and for its owner alone; its bytes."""
    tensors = {f"weight/{name}": array for name, array in frozen.weights.items()}
    tensors |= {f"cross/{n}": array for n, array in enumerate(frozen.cross)}
    tensors |= {"cache": frozen.cache, "logits": frozen.logits}
    meaning = msgspec.json.encode(_Meaning(graph=frozen.graph, position=frozen.position))
    return _write(path, tensors, {_MEANING: meaning.decode()})


def load(path: Path) -> Frozen:
    """A decode from a file that may be anybody's.

    Raises RefusedError for one that is broken, hostile or of something else.
    """
    tensors, metadata = _read(path)
    if _MEANING not in metadata:
        raise RefusedError(f"{path} holds tensors, but no decode frozen by mmctl")
    try:
        meaning = msgspec.json.decode(metadata[_MEANING], type=_Meaning)
    except (msgspec.DecodeError, UnicodeError) as error:
        raise RefusedError(f"{path} holds no decode that can be read: {error}") from None
    cross = [tensors[f"cross/{n}"] for n in range(len(tensors)) if f"cross/{n}" in tensors]
    frozen = Frozen(
        graph=meaning.graph, position=meaning.position,
        weights={
            name.removeprefix("weight/"): array
            for name, array in tensors.items() if name.startswith("weight/")
        },
        cache=tensors.get("cache"), cross=cross, logits=tensors.get("logits"),
    )  # fmt: skip
    if problem := _problem(frozen):
        raise RefusedError(f"{path} holds no decode that can go on: {problem}")
    return frozen


def _problem(frozen: Frozen) -> str | None:
    """Why the parts do not fit each other, if they do not."""
    graph, at = frozen.graph, frozen.position
    if min(graph.layers, graph.width, graph.vocabulary, at.index + 1) < 1 or at.past < 2:
        return "a size is not above nothing"
    if at.last is None or at.last[0] != at.past - 1:
        return "the step before the freeze is not told"
    if not all(0 <= token < graph.vocabulary for token in (at.token, at.last[1])):
        return "a token is outside the vocabulary"
    if not (0 <= at.sampler.seed < 1 << 63) or at.sampler.drawn < 0 or at.sampler.temperature < 0:
        return "the sampler's numbers are out of range"
    fits = (
        _is(frozen.cache, "float32", (2 * graph.layers, at.past, graph.width))
        and _is(frozen.logits, "float32", (graph.vocabulary,))
        and len(frozen.cross) == (graph.layers if graph.cross else 0)
        and all(_is(one, "float16", (2, None, graph.width)) for one in frozen.cross)
        and len({one.shape for one in frozen.cross}) <= 1
    )
    return None if fits else "tensors and graph are not of one shape"


def _is(array: Any, dtype: str, shape: tuple[int | None, ...]) -> bool:
    return (
        array is not None and array.dtype == dtype and array.ndim == len(shape)
        and all(want in (None, have) for want, have in zip(shape, array.shape, strict=True))
    )  # fmt: skip


def _write(path: Path, tensors: dict[str, Any], metadata: dict[str, str]) -> int:
    import numpy as np

    names = {np.dtype(kind): name for name, kind in _DTYPES.items()}
    header: dict[str, Any] = {"__metadata__": metadata}
    at = 0
    for name, array in tensors.items():
        end = at + array.nbytes
        header[name] = _Entry(names[array.dtype], list(array.shape), (at, end))
        at = end
    encoded = msgspec.json.encode(header)
    encoded += b" " * (-len(encoded) % 8)  # tensors begin on a multiple of eight
    with atomic.replacing(path, private=True) as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        for array in tensors.values():
            file.write(np.ascontiguousarray(array).data)
    return 8 + len(encoded) + at


def _read(path: Path) -> tuple[dict[str, Any], dict[str, str]]:
    """The tensors and the metadata of a safetensors file; RefusedError for what is none."""
    import numpy as np

    try:
        data = np.fromfile(path, np.uint8)
    except IsADirectoryError:
        raise RefusedError(f"{path} is a folder, not a file") from None
    except OSError as error:
        raise MmctlError(f"cannot read {path}: {error.strerror or error}") from None
    size = int.from_bytes(data[:8].tobytes(), "little")
    if len(data) < 8 or size > min(HEADER_MOST, len(data) - 8):
        raise RefusedError(f"{path} is no safetensors file: its header does not fit into it")
    try:
        header = msgspec.json.decode(data[8 : 8 + size].tobytes())
        metadata = msgspec.convert(header.pop("__metadata__", {}), dict[str, str])
        entries = msgspec.convert(header, dict[str, _Entry])
    except (msgspec.DecodeError, UnicodeError, AttributeError, RecursionError) as error:
        raise RefusedError(f"{path} is no safetensors file: {error}") from None
    body = data[8 + size :]
    tensors = {}
    for name, entry in entries.items():
        start, end = entry.data_offsets
        if entry.dtype not in _DTYPES:
            raise RefusedError(f"{path}: '{name[:80]}' is of an unknown type {entry.dtype[:20]}")
        kind = np.dtype(_DTYPES[entry.dtype])
        count = 1
        for side in entry.shape:
            count *= side
        sound = 0 <= start <= end <= len(body) and min(entry.shape, default=0) >= 0
        if not sound or len(entry.shape) > 8 or count * kind.itemsize != end - start:
            raise RefusedError(f"{path}: '{name[:80]}' does not lie in the file as told")
        tensors[name] = body[start:end].copy().view(kind).reshape(entry.shape)
    return tensors, metadata
