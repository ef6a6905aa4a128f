"""Strangers' pickles: refused with one line, nothing executed, little memory spent."""

from __future__ import annotations

import pickle
import pickletools
from pathlib import Path

import msgspec
import pytest

from mmctl.engine.untrusted import Limits, RefusedError, read_pickle

TARGET = "mmctl.engine.memory.columns:write"
MIB = 1 << 20


class Evil:
    """Asks the reader to write a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return (open, (str(self.path), "w"))


def cycle() -> bytes:
    endless: list[object] = []
    endless.append(endless)
    return pickle.dumps({"segments": endless, "device_traces": []})


def laughs() -> bytes:
    """A list of lists of lists, shared: small in memory, endless to walk."""
    level: list[object] = [0] * 10
    for _ in range(30):
        level = [level] * 10
    return pickle.dumps({"segments": [], "device_traces": [level]})


def deep(levels: int) -> bytes:
    return b"\x80\x04" + b"]" * levels + b"a" * (levels - 1) + b"."


HOSTILE = {
    "global": b"\x80\x04cos\nsystem\n(S'true'\ntR.",
    "stack_global": b"\x80\x04\x8c\x02os\x8c\x06system\x93.",
    "persistent": b"\x80\x04Pmine\n.",
    "memo_bomb": b"\x80\x04Nr\xff\xff\xff\x7f.",
    "bytearray_bomb": b"\x80\x05\x96" + (10 << 30).to_bytes(8, "little") + b".",
    "string_bomb": b"\x80\x04\x8d" + (10 << 30).to_bytes(8, "little") + b".",
    "frame_bomb": b"\x80\x04\x95" + (10 << 30).to_bytes(8, "little") + b".",
    "long_bomb": b"\x80\x04\x8b\xff\xff\xff\x7f.",
    "cycle": cycle(),
    "laughs": laughs(),
    "deep": deep(200_000),
    "truncated": pickle.dumps({"segments": [], "device_traces": [[{"action": "alloc"}]]})[:-9],
    "number": pickle.dumps(7),
    "wide_number": pickle.dumps(
        {"segments": [], "device_traces": [[
            {"action": "alloc", "addr": 1 << 80, "size": 1, "stream": 0}]]}
    ),
    "unhashable": pickle.dumps({"segments": [], "device_traces": [[{"action": [], "addr": 1}]]}),
    "empty_block": pickle.dumps([
        {"device": 0, "address": 0, "total_size": 0, "blocks": [{"size": 0, "state": "inactive"}]}
    ]),
    "empty": b"",
    "gzip": b"\x1f\x8b\x08\x00",
    "zip": b"PK\x03\x04",
    "noise": bytes(range(128, 256)) * 8,
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_file_is_refused_in_one_line(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_bytes(HOSTILE[name])
    with pytest.raises(RefusedError) as refusal:
        read_pickle(path, TARGET, Limits())
    assert "\n" not in str(refusal.value)
    assert name in str(refusal.value)


def test_nothing_is_executed(tmp_path: Path) -> None:
    path, mark = tmp_path / "evil", tmp_path / "mark"
    path.write_bytes(pickle.dumps(Evil(mark)))
    with pytest.raises(RefusedError, match=r"it asks for the Python object"):
        read_pickle(path, TARGET, Limits())
    assert not mark.exists()


def test_caps_name_their_flag(tmp_path: Path) -> None:
    frames = [{"name": "f", "filename": "x.py", "line": n} for n in range(50)]
    entry = {"action": "alloc", "addr": 512, "size": 1, "stream": 0, "frames": frames}
    path = tmp_path / "snapshot"
    path.write_bytes(pickle.dumps({"segments": [], "device_traces": [[entry] * 20]}))
    assert read_pickle(path, TARGET, Limits())
    for limits, flag in (
        (Limits(max_bytes=100), "--max-size"),
        (Limits(max_entries=10), "--max-entries"),
        (Limits(max_depth=49), "--max-depth"),
    ):
        with pytest.raises(RefusedError, match=flag):
            read_pickle(path, TARGET, limits)


def test_what_is_no_file_is_said(tmp_path: Path) -> None:
    with pytest.raises(RefusedError, match="cannot read"):
        read_pickle(tmp_path / "none", TARGET, Limits())
    with pytest.raises(RefusedError, match="folder"):
        read_pickle(tmp_path, TARGET, Limits())


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_protocols(protocol: int, tmp_path: Path) -> None:
    path = tmp_path / "bare"
    blocks = [{"size": 512, "requested_size": 9, "state": "active_awaiting_free"}]
    segments = [{"device": 1, "address": 4096, "total_size": 512, "blocks": blocks}]
    path.write_bytes(pickle.dumps(segments, protocol))
    data = read_pickle(path, TARGET, Limits())
    header = msgspec.msgpack.decode(data[8 : 8 + int.from_bytes(data[:8], "little")])
    assert header["bare"] is True
    assert header["era"] == "2.1"


def test_the_bombs_are_pickles() -> None:
    """The memo bomb is well formed: it is refused for what it asks, not for its spelling."""
    assert [op.name for op, _, _ in pickletools.genops(HOSTILE["memo_bomb"])][-1] == "STOP"
