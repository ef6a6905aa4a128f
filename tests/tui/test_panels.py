"""Panels as pure functions: their text at several widths, absent values, filters, marks."""

from __future__ import annotations

import re

import msgspec
import pytest
import scenes

from mmctl.engine.memory import draw
from mmctl.engine.records import Device, Event, Serving
from mmctl.engine.recovery.canaries import CANARIES
from mmctl.tui import (
    SCREENS,
    canary,
    events,
    frame,
    heatmap,
    overview,
    picture,
    recovery,
    schedule,
    text,
)
from mmctl.tui.filter import shown_devices
from mmctl.tui.heat import CONFLICT, FIELDS, VISION, Column, Columns, Rows
from mmctl.tui.keys import GENERAL
from mmctl.tui.lines import ASCII, UNICODE, fit, left, plain, shares, spark, width, window
from mmctl.tui.model import Model
from mmctl.tui.playback import Progress
from mmctl.tui.snapshot import DeviceView, Recovery, Snapshot
from mmctl.tui.ui import Ui
from mmctl.tui.view import views

WIDTHS = (20, 56, 76, 96, 120, 156, 300)


def told(lines) -> str:
    return "\n".join(plain(line).rstrip() for line in lines)


@pytest.mark.parametrize("columns", WIDTHS)
def test_lines_of_the_frame_are_exactly_as_wide_as_the_screen(burst, columns: int) -> None:
    for line in (frame.title(burst, Ui(), columns), frame.keys(burst, Ui(), columns, (), {})):
        assert width(line) == columns


@pytest.mark.parametrize("screen", SCREENS)
def test_hints_are_whole_or_not_there_and_help_always_is(burst, screen: str) -> None:
    ui = Ui(now_ns=burst.newest_ns, screen=screen, cost=(0.99, 999 << 20))
    own = views()[screen].keys
    words = {key.hint for key in (*own, *GENERAL)} | set(SCREENS)
    for columns in range(60, 240):
        line = plain(frame.keys(burst, ui, columns, own, {}))
        assert len(line) == columns and "…" not in line
        assert (
            "? help" in line
            and "q quit" in line
            and f"{list(SCREENS).index(screen) + 1} {screen}" in line
        )
        told = re.findall(r"\b[a-z]{3,}\b", line.partition("quit")[0])
        assert set(told) <= words
    assert all(word in line for word in words)
    assert "f1 help" in plain(frame.keys(burst, ui, 100, own, {"help": "f1,question_mark"}))


@pytest.mark.parametrize("columns", [76, 96, 120, 156])
def test_device_rows_fit_their_panel(burst, columns: int) -> None:
    lines = overview.devices(burst, Ui(), columns)
    assert len(lines) == 1 + 3 + 1
    assert max(width(line) for line in lines) <= columns
    assert "26%" in told(lines) and "49°" in told(lines) and "800 MiB" in told(lines)


def test_absent_is_a_dash_and_the_reason_is_told_at_the_cursor(burst) -> None:
    lines = overview.devices(burst, Ui(device=2), 120)
    row = plain(lines[3])
    assert "npu0" in row and "–" in row and "0%" not in row
    assert "npu-smi gives no utilisation for this chip (sm_ratio, bandwidth_ratio)" in plain(
        lines[-1]
    )


def test_state_is_a_word_and_a_mark(burst) -> None:
    assert "● CLOSED" in plain(frame.title(burst, Ui(), 120))


def test_an_observed_trip_says_would(burst) -> None:
    assert text.word(Event(ts_ns=0, what="trip", mode="observe")) == "would trip"
    assert text.word(Event(ts_ns=0, what="trip", mode="enforce")) == "tripped"


def test_names_from_strangers_cannot_move_the_cursor() -> None:
    evil = Device(ts_ns=0, device="gpu0\x1b[2J", kind="gpu", model="\x1b]0;x\x07", sm_ratio=0.5)
    snapshot = Snapshot(devices=(DeviceView(evil, (0.5,), ()),))
    assert "\x1b" not in told(overview.devices(snapshot, Ui(), 120))


def test_filter_holds_every_word(burst) -> None:
    assert [v.record.device for v in shown_devices(burst, Ui(filter="h100 gpu1"))] == ["gpu1"]
    assert "no device matches 'zzz'" in told(overview.devices(burst, Ui(filter="zzz"), 100))
    assert [e.what for e in events.shown_events(burst, Ui(filter="headroom"))] == ["trip"]


def test_evidence_shows_value_threshold_and_age(burst) -> None:
    at = [e.what for e in events.shown_events(burst, Ui())].index("trip")
    shown = told(events.evidence(burst, Ui(event=at), 54))
    rows = [line.split() for line in shown.splitlines()]
    assert ["need_bytes", "24.0", "MiB"] in rows
    after = rows[rows.index(["need_bytes", "24.0", "MiB"]) + 1 :]
    assert " ".join(after[0] + after[1]).startswith("> 12.0 MiB, 20.0 ms old, measured, holds")


def test_the_band_covers_the_whole_time_once(burst) -> None:
    line = events.band(burst, Ui(), 60)[0]
    assert width(line) == 60
    marks = plain(line)[8:]
    assert marks.index("▒") < marks.index("░") and marks.endswith("─")


def test_recovery_shows_steps_and_checks_side_by_side(burst) -> None:
    steps = told(recovery.steps(burst, Ui(), 96))
    assert "✓ tripped" in steps and "✓ responded (31.0 ms)" in steps and "✓ closed" in steps
    assert "offload_kv" in steps and "freed 78.0 MiB" in steps
    checks = told(recovery.checks(burst, Ui(), 96))
    assert "red_circle" in checks and "✓ passed" in checks and "4 of 4 passed" in checks


def test_a_failed_check_is_marked_and_named(burst) -> None:
    failed = Event(
        ts_ns=burst.newest_ns, node="a17", device="gpu0", what="verify",
        evidence={"verdict": "failed", "checks": [
            {"name": "red_circle", "value": "blue", "golden": "red", "passed": False}]},
    )  # fmt: skip
    old = burst.recoveries[0]
    snapshot = msgspec.structs.replace(
        burst, recoveries=(msgspec.structs.replace(old, events=(*old.events, failed)),)
    )
    assert "✗ failed" in told(recovery.checks(snapshot, Ui(), 96))
    assert "✗ verified" in told(recovery.steps(snapshot, Ui(), 96))


def test_an_empty_screen_says_which_source_gives_what() -> None:
    waiting = told(overview.devices(Snapshot(), Ui(sources=("demo",)), 100))
    assert waiting == "waiting for the first record of demo"
    empty = Snapshot(records=1)
    assert "nvml:" in told(overview.devices(empty, Ui(), 100))
    assert "/metrics" in told(overview.serving(empty, Ui(), 100))
    assert "agent:PATH" in told(overview.headroom(empty, Ui(), 100))
    assert "No device has been tripped" in told(recovery.steps(empty, Ui(), 100))


def test_heat_codes_put_the_newest_column_at_the_right(burst) -> None:
    (pool,) = burst.pools
    level = pool.heat[1]
    rows = picture.view_rows(level, Ui(), 40)
    assert rows.row_count == 40 and rows.row_bytes == 20 * 2**20
    codes = picture.Picture().rows(level, rows, "conflict", 100)
    assert len(codes) == 40 and {len(row) for row in codes} == {100}
    assert all(row[0] == 0 for row in codes)  # 80 columns of half a second, nothing before
    assert any(row[99] for row in codes)


def test_heat_shown_in_fewer_rows_keeps_round_addresses(burst) -> None:
    rows = picture.view_rows(burst.pools[0].heat[1], Ui(), 19)
    assert rows.row_count <= 19 and rows.row_bytes % picture.ROUND_BYTES == 0
    assert rows.end_address >= rows.base_address + 40 * 20 * 2**20


def test_kept_columns_give_the_same_picture_as_fresh_ones(burst) -> None:
    level = burst.pools[0].heat[1]
    rows = picture.view_rows(level, Ui(), 30)
    kept = picture.Picture()
    for _ in range(2):
        again = kept.rows(level, rows, "modality", 70)
    assert again == picture.Picture().rows(level, rows, "modality", 70)


def test_region_under_the_cursor_adds_up(burst) -> None:
    level = burst.pools[0].heat[1]
    rows = picture.view_rows(level, Ui(), 40)
    shown = told(heatmap.region_told(burst, level, rows, Ui(cell=(4, 16)), 120))
    assert "0x7f10_1400_0000 (20.0 MiB)" in shown and "t -2.0 s" in shown
    assert "conflict" in shown and "usable" in shown


def test_age_and_pages_of_a_region_are_told(burst) -> None:
    level = burst.pools[0].heat[0]
    rows = picture.view_rows(level, Ui(), 40)
    shown = told(heatmap.region_told(burst, level, rows, Ui(cell=(0, 17)), 200))
    assert "age 21.3 s" in shown  # 0.4 s x 2^(17/3), and the second of the burst / 40
    assert "80 partly" in shown
    drawn = picture.Picture().rows(level, rows, "age", 1)
    assert drawn[0] == b"\x03" and drawn[39] == b"\x09"  # young above, the oldest below
    drawn = picture.Picture().rows(level, rows, "pages", 1)
    assert {row for row, code in enumerate(drawn) if code == b"\x02"} == set(range(3, 40, 7))


def test_a_recording_without_ages_and_pages_says_so() -> None:
    model = Model()
    for tick in range(20):
        pool = scenes.pool(tick, scenes.START_NS + tick * 10**9)
        heat = msgspec.structs.replace(pool.heat, age_s=None, pages=None)
        model.add(msgspec.structs.replace(pool, heat=heat))
    (view,) = model.snapshot().pools
    level = view.heat[1]
    rows = picture.view_rows(level, Ui(), 40)
    for layer in ("age", "pages"):
        assert set(b"".join(picture.Picture().rows(level, rows, layer, 9))) == {0}
        caption = plain(heatmap.caption(view, Ui(layer=layer), level, 160, 100))
        assert "not told by this source" in caption
    shown = told(heatmap.region_told(model.snapshot(), level, rows, Ui(cell=(0, 17)), 200))
    assert "age" not in shown and "pages" not in shown and "conflict" in shown


@pytest.mark.parametrize("glyphs", [UNICODE, ASCII])
def test_every_kind_has_a_character_of_its_own(glyphs) -> None:
    marks = {glyphs.vision, glyphs.text, glyphs.other, glyphs.free, glyphs.unusable}
    assert len(marks) == 5
    assert len({mark for mark, _ in picture.legend("modality", glyphs)}) == 5


def test_shares_fill_the_bar_and_show_every_part() -> None:
    bar = shares([(1000, "a", ""), (1, "b", ""), (0, "c", ""), (500, "d", "")], 20)
    assert width(bar) == 20 and "b" in plain(bar) and "c" not in plain(bar)


def test_sparks_scale_and_leave_gaps() -> None:
    assert spark([0, 0.5, 1.0, None, 2.0], 1.0) == "▁▅█ █"
    assert spark([1.0], 0.0) == "▁"


def test_text_is_cut_by_columns_not_characters() -> None:
    assert width(((left("日本語のモデル", 7), ""),)) == 7
    assert plain(fit((("abcdef", ""),), 4)) == "abc…"


def test_a_device_that_falls_silent_does_not_look_healthy(burst) -> None:
    later = msgspec.structs.replace(burst, newest_ns=burst.newest_ns + 12 * 10**9)
    lines = overview.devices(later, Ui(live=False), 120)
    assert "– no reading for 12 s" in plain(lines[1]) and "26%" not in plain(lines[1])
    assert "no reading for 12 s" in told(overview.serving(later, Ui(live=False), 80))
    assert "no record of this pool for 12 s" in told(overview.headroom(later, Ui(live=False), 80))


def test_slow_readings_are_not_silence(burst) -> None:
    view = burst.devices[0]
    slow = msgspec.structs.replace(view, period_ns=15 * 10**9)
    later = msgspec.structs.replace(burst, newest_ns=burst.newest_ns + 12 * 10**9, devices=(slow,))
    assert "26%" in told(overview.devices(later, Ui(live=False), 120))


def test_a_window_on_lines_says_what_is_below_and_reaches_the_end() -> None:
    lines = [((str(i), ""),) for i in range(10)]
    assert window(lines, 12, 3) == lines
    assert told(window(lines, 4, 0)).split("\n") == ["0", "1", "2", "7 more lines below"]
    assert told(window(lines, 4, 6)).split("\n") == ["6", "7", "8", "9"]
    assert told(window(lines, 4, 99)).split("\n") == ["6", "7", "8", "9"]


def test_failed_checks_come_first(burst) -> None:
    checks = [{"name": "good", "passed": True}, {"name": "bad", "passed": False}]
    event = Event(ts_ns=1, node="a", device="d", what="verify", evidence={"checks": checks})
    snapshot = Snapshot(recoveries=(Recovery("a", "d", (event,)),))
    names = [plain(line).split()[0] for line in recovery.checks(snapshot, Ui(), 90)[2:]]
    assert names == ["▸", "good"]  # the cursor stands on the one that failed
    assert recovery.selected(snapshot, Ui())["name"] == "bad"
    assert recovery.selected(snapshot, Ui(scroll=9))["name"] == "good"


def test_many_checks_are_shown_around_the_cursor(burst) -> None:
    checks = [{"name": f"check{i}", "passed": True} for i in range(30)]
    event = Event(ts_ns=1, node="a", device="d", what="verify", evidence={"checks": checks})
    snapshot = Snapshot(recoveries=(Recovery("a", "d", (event,)),))
    for at in (0, 13, 29):
        lines = recovery.checks(snapshot, Ui(scroll=at), 90, 10)
        assert len(lines) == 10 and f"▸ check{at} " in told(lines)


def test_a_receipt_says_why_beside_its_message() -> None:
    route = Event(ts_ns=1, device="gpu1", what="route", message="request 7",
                  evidence={"policy": "perception", "load": 1.34, "next_best": "gpu0"})  # fmt: skip
    shown = told(schedule.receipts(Snapshot(placements=(route,)), Ui(), 120, 5))
    assert "gpu1   request 7, policy perception, load 1.34, next best gpu0" in shown


def test_a_check_names_its_canary() -> None:
    assert canary.named({"name": "red_circle"}) == "red_circle"
    assert canary.named({"name": "red_circle/caption"}) == "red_circle"
    decided = {"name": "image_embedding_cosine", "detail": "least in word_stop"}
    assert canary.named(decided) == "word_stop"
    assert canary.named({"name": "caption_bleu", "detail": None}) is None
    assert canary.named({}) is None


def test_a_canary_is_drawn_with_its_question() -> None:
    lines = canary.panel("orange_bar", 34, 24, UNICODE)
    assert max(map(width, lines)) <= 34 and len(lines) <= 24
    drawn = [line for line in lines if plain(line).startswith("▀")]
    assert len(drawn) == 17 and {width(line) for line in drawn} == {34}
    assert {role for line in drawn[:8] for _, role in line} == {"#ff7f0e on #ff7f0e"}
    assert {role for line in drawn[9:] for _, role in line} == {"#8232a0 on #8232a0"}
    assert "What colour is the top half?" in told(lines) and "right answer orange" in told(lines)
    letters = told(canary.panel("orange_bar", 34, 24, ASCII)).split("\n")
    assert letters[0] == "o" * 34 and letters[16] == "p" * 34
    assert "right answer" in told(canary.panel("orange_bar", 34, 5, UNICODE))  # no room to draw


@pytest.mark.parametrize("name", [one.name for one in CANARIES])
def test_every_canary_shows_all_its_colours(name: str) -> None:
    drawn = {c for line in canary.panel(name, 34, 30, ASCII)[:17] for c in plain(line)}
    (marks,) = (one.marks for one in CANARIES if one.name == name)
    assert {"k" if mark.colour == "black" else mark.colour[0] for mark in marks} <= drawn


def columns_at(*starts: int, step: int = 10**9) -> Columns:
    return Columns(step, tuple(Column(at * step, Rows(0, 1, 0), b"", at, 0, 0, 0) for at in starts))


def test_a_column_holds_until_the_next_but_not_over_a_long_gap() -> None:
    level = columns_at(0, 1, 3, 9, 10)
    shown = [column and column.vision_bytes for column in picture.placed(level, 8)]
    #        3  4     5     6     7     8     9  10
    assert shown == [3, None, None, None, None, None, 9, 10]
    shown = [column and column.vision_bytes for column in picture.placed(columns_at(0, 1, 3), 6)]
    assert shown == [None, None, 0, 1, 1, 3]
    assert picture.placed(Columns(1, ()), 3) == [None] * 3


def test_another_pool_of_the_same_shape_is_another_picture() -> None:
    model = Model()
    for tick in range(20):
        at = scenes.START_NS + tick * 10**9
        model.add(scenes.pool(tick, at, "gpu0"))
        model.add(scenes.pool(tick + 11, at, "gpu1"))
    first, second = model.snapshot().pools
    rows = picture.view_rows(first.heat[1], Ui(), 40)
    kept = picture.Picture()
    one = kept.rows(first.heat[1], rows, "conflict", 60)
    two = kept.rows(second.heat[1], rows, "conflict", 60)
    assert one != two
    assert two == picture.Picture().rows(second.heat[1], rows, "conflict", 60)


def test_little_conflict_looks_like_little_and_never_like_none() -> None:
    marks = [mark for mark, _ in picture.legend("conflict", UNICODE)]

    def drawn(conflict: float) -> str:
        cells = [0.0] * FIELDS
        cells[CONFLICT], cells[VISION] = conflict, 1.0
        return marks[picture._CODES["conflict"](cells, 0)]

    shown = "".join(drawn(at) for at in (0.0, 0.004, 0.01, 0.08, 0.15, 0.25, 0.4, 0.5, 0.7, 1.0))
    assert shown == "··░░▒▒▓▓██"
    assert picture.CONFLICTS[::2] == draw.STEPS  # what mmctl probe snapshot draws
    told = plain(heatmap.scale(Ui(), short=False))
    assert told == "· none  ░░ from .005  ▒▒ .1  ▓▓ .3  ██ .6  "


def test_a_single_record_is_drawn_at_any_width_of_column() -> None:
    model = Model()
    model.add(scenes.pool(8, scenes.START_NS))
    (view,) = model.snapshot().pools
    for level in range(4):
        assert len(heatmap.level_of(view, Ui(level=level)).columns) == 1


def test_a_step_is_to_be_done_again_once_an_earlier_one_was() -> None:
    events_ = [Event(ts_ns=i, what=what) for i, what in enumerate(
        ("trip", "respond", "verify", "half_open", "rebuild", "verify"))]  # fmt: skip
    snapshot = Snapshot(recoveries=(Recovery("a17", "gpu0", tuple(events_)),))
    chain = plain(recovery.steps(snapshot, Ui(), 160)[1])
    assert "✓ rebuilt   ✓ verified   ○ half open   ○ closed" in chain


def test_half_open_without_traffic_says_what_is_counted() -> None:
    again = {"reason": "verified again: no request was completed", "deadline_s": 60.0,
             "verifications_passed": 1, "verifications_needed": 3}  # fmt: skip
    events_ = (Event(ts_ns=1, what="half_open", state="half_open", evidence={"deadline_s": 60.0}),
               Event(ts_ns=2, what="state", state="half_open", evidence=again))  # fmt: skip
    snapshot = Snapshot(recoveries=(Recovery("a17", "gpu0", events_),), newest_ns=10**10)
    told = " ".join(plain(line) for line in recovery.steps(snapshot, Ui(), 160))
    assert "half open: verified again: no request was completed, 1 of 3 in a row" in told
    assert "deadline in 50" in told


def test_an_engine_that_cannot_be_read_does_not_look_idle() -> None:
    model = Model()
    why = "127.0.0.1:8000 does not answer"
    model.add(Serving(ts_ns=1, engine="vllm", instance=":8000", absent={"running": why}))
    (line,) = overview.serving(model.snapshot(), Ui(live=False), 60)
    assert plain(line).rstrip() == f"vllm :8000  – {why}" and line[1][1] == "bad_strong"


def test_what_holds_no_record_is_not_waited_for() -> None:
    bare = Progress(0, 0, (), True, 1.0)
    for ui, wanted in (
        (Ui(sources=("a.ndjson",), playback=bare), "NO RECORD"),
        (Ui(sources=("-",), ended="END OF RECORDS"), "NO RECORD"),
        (Ui(sources=("nvml:",)), "waiting for records"),
        (Ui(sources=("a.ndjson",), playback=Progress(0, 9, (), True, 1.0)), "waiting for records"),
    ):
        assert wanted in plain(frame.title(Snapshot(), ui, 100))
        waits = "waiting for the first" in told(overview.devices(Snapshot(), ui, 100))
        assert waits is (wanted == "waiting for records")


@pytest.mark.parametrize("columns", [34, 36, 52, 76])
def test_evidence_is_whole_in_a_panel_of_any_width(columns: int) -> None:
    when = "count(released_bytes, 1s) >= 4 and device_free_bytes_of_the_device_now < 4% * capacity"
    event = Event(ts_ns=0, what="trip", message=when, evidence={"when": when, "inputs": [
        {"name": "sum(released_bytes, 1s)", "value": 3, "comparison": ">=", "threshold": 4,
         "age_s": 0.5, "basis": "measured", "truth": False}]})  # fmt: skip
    lines = events.told(event, columns)
    assert max(map(width, lines)) <= columns
    shown = "".join("".join(map(plain, lines)).split())
    assert shown.count(when.replace(" ", "")) == 2 and "500msold" in shown


def test_an_empty_list_in_evidence_is_a_dash() -> None:
    assert text.value("rules", {"respond": [], "mode": "inherit"}) == "respond –, mode inherit"
