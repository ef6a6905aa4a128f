"""Recordings under control: the index, entering anywhere, pausing, speed, jumps, damage."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
import scenes
import zstandard

from mmctl.engine import recording
from mmctl.engine.errors import MmctlError
from mmctl.engine.records import Event, Recording, encode
from mmctl.engine.streams import time_ns
from mmctl.tui.feed import Feed
from mmctl.tui.model import Model
from mmctl.tui.playback import SPEEDS, Playback, Rewind
from mmctl.tui.snapshot import Snapshot

SECOND = 10**9


@pytest.fixture(scope="module")
def lines() -> list[bytes]:
    return [encode(record) + b"\n" for record in scenes.burst(40)]


@pytest.fixture(scope="module")
def path(lines, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("playback") / "burst.ndjson"
    path.write_bytes(b"".join(lines))
    return path


def test_index_knows_span_events_and_entries(path: Path, lines) -> None:
    index = recording.index(path)
    assert index.head.node == "a17"
    assert index.started_ns == scenes.START_NS
    assert index.ended_ns == scenes.START_NS + int(39.9 * SECOND)
    assert [event.what for event in index.events] == [e.what for _, e in scenes.decisions()]
    assert len(index.marks) >= 5
    assert sum(1 for _ in index.read_from(0)) == len(lines)


@pytest.mark.parametrize("second", [0.0, 13.37, 39.9])
def test_reading_from_a_moment_begins_before_it_and_skips_nothing(path: Path, second) -> None:
    index = recording.index(path)
    wanted = scenes.START_NS + int(second * SECOND)
    after = [r for r in index.read_from(wanted) if getattr(r, "ts_ns", 0) >= wanted]
    every = [r for r in recording.read(path) if getattr(r, "ts_ns", 0) >= wanted]
    assert after == every


def test_a_compressed_recording_is_entered_like_a_plain_one(path: Path, tmp_path: Path) -> None:
    packed = tmp_path / "burst.ndjson.zst"
    packed.write_bytes(zstandard.compress(path.read_bytes()))
    plain, unpacked = recording.index(path), recording.index(packed)
    assert unpacked.marks == plain.marks and unpacked.events == plain.events


def test_a_cut_recording_loses_only_its_last_line(lines, tmp_path: Path) -> None:
    cut = tmp_path / "cut.ndjson"
    cut.write_bytes(b"".join(lines)[:-7])
    index = recording.index(cut)
    assert sum(1 for _ in index.read_from(0)) == len(lines) - 1


@pytest.mark.parametrize("content", [b"", b"\n\n", b"not json\n", b"\x00" * 4096, b'{"a": 1}\n'])
def test_what_is_no_recording_is_refused_in_one_line(content: bytes, tmp_path: Path) -> None:
    bad = tmp_path / "bad"
    bad.write_bytes(content)
    with pytest.raises(MmctlError, match="holds no record"):
        recording.index(bad)


def test_events_of_a_foreign_writer_are_found(tmp_path: Path) -> None:
    spaced = tmp_path / "spaced.ndjson"
    spaced.write_text(
        '{"ts_ns": 1, "type" : "event", "what": "trip"}\n { "type": "event", "ts_ns": 2,'
        ' "what": "oom"}\n{"type": "event", "ts_ns": 3, "what": "close"}\n'
    )
    index = recording.index(spaced)
    assert [(e.ts_ns, e.what) for e in index.events] == [(1, "trip"), (2, "oom"), (3, "close")]


class Screen:
    """What a feed sends, as the screen would keep it."""

    def __init__(self, path: Path) -> None:
        self.stop = threading.Event()
        self.playback = Playback([path], self.stop, 120.0)
        self.snapshot = Snapshot()
        self.feed = Feed(
            self.playback.records(), Model, self.stop, fresh=self._fresh, ended=self._ended
        )
        self.error: BaseException | None = None
        self.feed.start()

    def _fresh(self, snapshot: Snapshot) -> None:
        self.snapshot = snapshot

    def _ended(self, error: BaseException | None) -> None:
        self.error = error

    def second(self) -> float:
        return ((self.snapshot.newest_ns or scenes.START_NS) - scenes.START_NS) / SECOND

    def wait(self, condition, what: str) -> None:
        for _ in range(500):
            if condition():
                return
            time.sleep(0.02)
        raise AssertionError(f"never: {what}")

    def close(self) -> None:
        assert self.feed.close(5.0), "the feed did not stop"


@pytest.fixture
def screen(path: Path):
    screen = Screen(path)
    yield screen
    screen.close()


def test_a_jump_shows_the_state_and_events_of_that_moment(screen: Screen) -> None:
    screen.playback.toggle()
    screen.playback.seek(scenes.START_NS + int(24.5 * SECOND))
    screen.wait(lambda: screen.second() >= 24.3, "the moment")
    assert screen.snapshot.state == "verifying"
    assert screen.snapshot.events[-1].what == "state"
    screen.playback.seek(scenes.START_NS + 10 * SECOND)
    screen.wait(lambda: screen.second() <= 10.0, "back again")
    assert screen.snapshot.state == "closed" and not screen.snapshot.recoveries


def test_next_and_previous_event_are_reached_in_turn(screen: Screen) -> None:
    screen.wait(lambda: screen.playback.progress() is not None, "the index")
    screen.playback.toggle()
    position = scenes.START_NS
    seen = []
    while screen.playback.jump(position, True):
        wanted = next(at for at in screen.playback.progress().events_ns if at > position)
        screen.wait(lambda w=wanted: screen.snapshot.events
                    and screen.snapshot.events[-1].ts_ns == w, "the event")  # fmt: skip
        seen.append(screen.snapshot.events[-1].what)
        position = wanted
    assert seen == [event.what for _, event in scenes.decisions()][1:]  # not at the first line
    assert not screen.playback.jump(scenes.START_NS, False)


def test_held_means_held_and_a_step_moves_a_tenth(screen: Screen) -> None:
    screen.wait(lambda: screen.second() > 0.2, "playing")
    screen.playback.toggle()
    time.sleep(0.3)
    held = screen.snapshot.newest_ns
    time.sleep(0.5)
    assert screen.snapshot.newest_ns == held
    screen.playback.step(held, SECOND // 10)
    screen.wait(lambda: screen.snapshot.newest_ns > held, "a step")
    time.sleep(0.3)
    assert screen.snapshot.newest_ns == held + SECOND // 10


def test_at_the_end_it_waits_and_can_go_back(screen: Screen) -> None:
    screen.playback.seek(scenes.START_NS + 39 * SECOND)
    screen.playback.faster(100)
    screen.wait(lambda: screen.second() >= 39.9, "the end")
    screen.wait(lambda: not screen.playback.progress().playing, "held at the end")
    screen.playback.seek(scenes.START_NS)
    screen.wait(lambda: screen.second() < 1, "the beginning")


def test_speed_keeps_to_its_steps(screen: Screen) -> None:
    screen.wait(lambda: screen.playback.progress() is not None, "the index")
    screen.playback.toggle()
    screen.playback.faster(-100)
    assert screen.playback.progress().speed == SPEEDS[0]
    screen.playback.faster(100)
    assert screen.playback.progress().speed == SPEEDS[-1]


def test_entering_equals_playing_up_to_there(path: Path) -> None:
    """Trends and states after a jump are those of having watched all along."""
    moment = scenes.START_NS + 30 * SECOND
    watched = Model()
    for record in recording.read(path):
        if isinstance(record, Recording) or record.ts_ns <= moment:
            watched.add(record)
    playback = Playback([path], threading.Event(), 120.0)
    playback.seek(moment)
    entered = Model()
    for record in next(r for r in playback.records() if isinstance(r, Rewind)).records:
        entered.add(record)
    a, b = watched.snapshot(), entered.snapshot()
    assert (a.state, a.states, a.events, a.recoveries) == (
        b.state,
        b.states,
        b.events,
        b.recoveries,
    )
    assert a.devices == b.devices and a.serving == b.serving
    assert [p.record for p in a.pools] == [p.record for p in b.pools]


def test_a_broken_line_ends_the_playback_with_its_reason(lines, tmp_path: Path) -> None:
    bad = tmp_path / "bad.ndjson"
    bad.write_bytes(b"".join(lines[:40]) + b"rubbish\n" + b"".join(lines[40:]))
    screen = Screen(bad)
    screen.playback.faster(100)
    screen.wait(lambda: screen.error is not None, "the error")
    assert isinstance(screen.error, MmctlError) and "not a record" in str(screen.error)
    screen.close()


def test_recording_from_within_replays(path: Path, tmp_path: Path) -> None:
    screen = Screen(path)
    out = tmp_path / "kept.ndjson.zst"
    screen.feed.record_to(recording.Writer(out, recording.header("a17", "default")))
    screen.playback.faster(100)
    screen.wait(lambda: any(e.what == "close" for e in screen.snapshot.events), "the close")
    screen.close()
    kept = list(recording.read(out))
    assert isinstance(kept[0], Recording)
    assert [r.what for r in kept if isinstance(r, Event)][-1] == "close"


def test_recordings_of_several_nodes_play_as_one(tmp_path: Path) -> None:
    import msgspec

    paths = []
    for node, shift_s in (("a17", 0), ("b3", 2)):
        path = tmp_path / f"{node}.ndjson"
        moved = []
        for record in scenes.burst(10):
            if isinstance(record, Recording):
                moved.append(msgspec.structs.replace(record, node=node))
            else:
                at = record.ts_ns + shift_s * SECOND
                moved.append(msgspec.structs.replace(record, node=node, ts_ns=at))
        path.write_bytes(b"".join(encode(record) + b"\n" for record in moved))
        paths.append(path)
    playback = Playback(paths, threading.Event(), 60.0)
    playback.faster(100)
    seen = []
    for record in playback.records():
        if not isinstance(record, Rewind):
            seen.append(record)
        if len(seen) == 300:
            break
    times = [time_ns(record) for record in seen]
    assert times == sorted(times)
    assert {record.node for record in seen} == {"a17", "b3"}
    progress = playback.progress()
    assert progress.ended_ns - progress.started_ns == int(11.9 * SECOND)
