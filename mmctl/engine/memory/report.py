"""Everything about a snapshot or a message in one document: state, replay, errors, what if."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from mmctl.engine.errors import UsageError
from mmctl.engine.memory import heatmap as heat
from mmctl.engine.memory import messages, ooms, snapshot, state
from mmctl.engine.memory.allocator import Segment, Tag
from mmctl.engine.memory.lint import Lint, lint
from mmctl.engine.memory.program import Program, reason_without
from mmctl.engine.memory.replay import Replay, fidelity, moments, prepared, segments_at
from mmctl.engine.memory.settings import Settings, parse, show
from mmctl.engine.memory.snapshot import Snapshot, pool_name
from mmctl.engine.memory.whatif import Outcome, Requests, what_if
from mmctl.engine.profiles import Profile
from mmctl.engine.records import SCHEMA
from mmctl.engine.untrusted import Limits, RefusedError

if TYPE_CHECKING:
    from mmctl.engine.memory.snapshot import Ints

MICROSECOND = 1e-6
TEXT_LIMIT = 256 << 20
TIMELINE_POINTS = 70


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """What is asked of a report. ``at`` is an entry of the trace, ``confs`` texts of settings;
    heatmaps are drawn for traces of up to ``heatmap_events`` (0: none, None: of any length)."""

    what_if: bool = True
    confs: tuple[str, ...] = ()
    capacity_bytes: int | None = None
    at: int | None = None
    heatmap_events: int | None = 0
    limits: Limits = Limits()


class Report(NamedTuple):
    """The document, its heatmaps (one per device, if asked for), and whether it is a finding."""

    document: dict[str, Any]
    heatmaps: list[heat.Heatmap]
    finding: bool


class _Device(NamedTuple):
    """What is known of one device on the way to the document."""

    number: int
    segments: list[Segment]
    program: Program | None
    absent: str | None
    replay: Replay | None
    tag_of: Callable[[int], Tag]
    codes: Ints | None
    oom_segments: list[tuple[int, list[Segment]]]
    event: int  # the state shown is that before this event


def of_file(path: Path, profile: Profile, options: Options) -> Report:
    """The report of a snapshot, or of a text that holds out-of-memory messages.

    Raises RefusedError for a file that is neither, UsageError for settings that torch would
    refuse or an entry that the trace does not have.
    """
    try:
        with open(path, "rb") as file:
            start = file.read(2)
            if start[:1] != b"\x80" and not _packed(start):
                return of_text(_text(path, start + file.read(TEXT_LIMIT)), str(path))
    except OSError as error:
        raise RefusedError(f"cannot read {path}: {error.strerror}") from None
    return of_snapshot(snapshot.read(path, options.limits), profile, options)


def _packed(start: bytes) -> bool:
    return start in (b"\x1f\x8b", b"\x28\xb5", b"PK", b"\x7fE") or not start


def _text(path: Path, data: bytes) -> str:
    text = data.decode("utf-8", "replace")
    if text.startswith('{"type":'):
        # Its events quote messages, but without the figures that a cause rests on.
        raise RefusedError(f"{path} holds records, not a log: that is for mmctl breaker replay")
    if "out of memory" not in text.lower() and '"tried"' not in text:
        raise RefusedError(
            f"{path} is neither a memory snapshot (pickle, protocol 2 to 5) nor a text with an "
            "out-of-memory message"
        )
    return text


def of_text(text: str, name: str) -> Report:
    """The report of every out-of-memory message in a text."""
    found = messages.find(text)
    if not found:
        raise RefusedError(f"{name} holds no out-of-memory message of torch's")
    document = {
        "schema": SCHEMA, "file": name, "era": None, "devices": [], "replay": None,
        "replay_absent": "a message holds no history",
        "oom": [msgspec.to_builtins(ooms.from_message(message)) for message in found],
        "what_if": [], "lint": [],
    }  # fmt: skip
    return Report(document, [], True)


def of_snapshot(found: Snapshot, profile: Profile, options: Options) -> Report:
    """The report of a snapshot that was read."""
    confs = [parse(text) for text in options.confs]
    tags = snapshot.stack_tags(found, profile.modality)
    words = snapshot.metadata_tags(found, profile.modality)
    devices = [_device(found, number, tags, words, options) for number in found.devices()]
    _check_entry(devices, options.at)
    outcomes: list[Outcome] = []
    errors: list[ooms.Oom] = []
    for one in devices:
        mine = _outcomes(one, confs, options)
        outcomes += mine
        errors += _ooms(one, mine, options)
    figures = [_figures(found, one, profile) for one in devices]
    heatmaps = [
        _heatmap(found, one, profile) for one in devices if _drawn(one, options.heatmap_events)
    ]
    replays = [one.replay for one in devices if one.replay is not None]
    document: dict[str, Any] = {
        "schema": SCHEMA,
        "file": found.file,
        "era": found.era,
        "settings": show(_settings(found, devices)),
        "settings_basis": "recorded" if found.settings_recorded else "inferred",
        "devices": figures,
        "replay": _replay(replays),
    }
    if not replays:
        reasons = dict.fromkeys(one.absent for one in devices if one.absent)
        document["replay_absent"] = "; ".join(reason or "" for reason in reasons) or "no devices"
    document["oom"] = [msgspec.to_builtins(one) for one in errors]
    document["what_if"] = [msgspec.to_builtins(one) for one in outcomes]
    document["lint"] = [msgspec.to_builtins(one) for one in _lint(found, devices, confs)]
    finding = bool(errors) or any(pool["false_free"] for one in figures for pool in one["pools"])
    return Report(document, heatmaps, finding)


def _device(
    found: Snapshot, number: int, tags: list[Tag], words: list[Any], options: Options
) -> _Device:
    absent = reason_without(found, number)
    if absent is not None:
        segments = snapshot.segments_of(found, number, tags)
        return _Device(number, segments, None, absent, None, lambda _: Tag(), None, [], 0)
    program = prepared(found, number)
    tag_of, codes = _unit_tags(program, tags, words)
    last = program.rows.shape[1]
    shown = last if options.at is None else _event_of(program, options.at)
    errors = ooms.oom_events(program)
    stops = sorted({*errors, shown, last})
    oom_segments = []
    segments = []
    replay = None
    for moment in moments(program, stops):
        if moment.event in errors:
            oom_segments.append((moment.event, segments_at(program, moment, tag_of)))
        if moment.event == shown:
            segments = segments_at(program, moment, tag_of)
        if moment.event == last:
            replay = fidelity(found, program, moment)
    if options.at is None and replay is not None and not replay.final_equal:
        segments = snapshot.segments_of(found, number, tags)
    return _Device(
        number, segments, program, None, replay, tag_of, codes, oom_segments, shown
    )  # fmt: skip


def _event_of(program: Program, entry: int) -> int:
    """The first event at or after an entry of the trace; its end where the trace is shorter."""
    import numpy as np

    return int(np.searchsorted(program.entry, entry, "left"))


def _check_entry(devices: Sequence[_Device], at: int | None) -> None:
    """An entry that no trace has is the user's mistake."""
    if at is None:
        return
    last = {
        one.number: int(one.program.entry[-1]) for one in devices if one.program is not None
    }  # fmt: skip
    if not last:
        raise UsageError("--at needs a history, and none was recorded")
    if not 0 <= at <= max(last.values()):
        known = ", ".join(f"0 to {entry} (device {number})" for number, entry in last.items())
        raise UsageError(f"--at {at}: the trace has entries {known}")


def _unit_tags(
    program: Program, tags: list[Tag], words: list[Any]
) -> tuple[Callable[[int], Tag], Ints]:
    """The tag of a unit (its user's words before its stack), and all units' modality codes."""
    import numpy as np

    by_stack = np.array([heat.CODES[tag.modality] for tag in tags], np.int64)
    by_word = np.array([-1 if word is None else heat.CODES[word] for word in words], np.int64)
    said = by_word[program.unit_metadata]
    codes = np.where(said >= 0, said, by_stack[program.unit_stack])

    def tag_of(unit: int) -> Tag:
        tag = tags[int(program.unit_stack[unit])]
        word = words[int(program.unit_metadata[unit])]
        return tag if word is None else Tag(word, tag.holder)

    return tag_of, codes


def _replay(replays: Sequence[Replay]) -> dict[str, Any] | None:
    """The sums over devices, and each device's own."""
    if not replays:
        return None
    return {
        "allocs": sum(one.allocs for one in replays),
        "exact": sum(one.exact for one in replays),
        "segments": sum(one.segments for one in replays),
        "exact_segments": sum(one.exact_segments for one in replays),
        "final_equal": all(one.final_equal for one in replays),
        "devices": [msgspec.to_builtins(one) for one in replays],
    }


def _figures(found: Snapshot, one: _Device, profile: Profile) -> dict[str, Any]:
    reference = profile.memory.reference_bytes
    streams = state.stream_figures(one.segments)
    held = state.modality_bytes(one.segments)
    ratio, window_s = _conflict(found, one, profile)
    figures: dict[str, Any] = {"device": one.number}
    for name in (
        "reserved_bytes", "allocated_bytes", "active_bytes", "pending_bytes", "free_bytes",
        "releasable_bytes",
    ):  # fmt: skip
        figures[name] = sum(getattr(stream, name) for stream in streams)
    figures |= {
        "largest_free_bytes": max((s.largest_free_bytes for s in streams), default=0),
        "fragmentation_ratio": state.fragmentation(streams),
        "segments": len(one.segments),
        "blocks": sum(len(segment.blocks) for segment in one.segments),
        "pools": [
            {
                **msgspec.to_builtins(stream),
                "pool": pool_name(stream.pool),
                "false_free": stream.free_bytes >= reference
                and max(stream.largest_free_bytes, stream.releasable_bytes) < reference,
            }
            for stream in streams
        ],
        "modalities": held,
        "stranded_bytes": {
            name: state.stranded(one.segments, name, reference) for name in ("vision", "text")
        },
        "conflict_ratio": ratio,
        "conflict_window_s": window_s,
        "pages": msgspec.to_builtins(state.pages(one.segments)),
        "lifetimes": _lifetimes(found, one),
        "timeline": _timeline(found, one),
        "holders": [
            msgspec.to_builtins(holder) for holder in ooms.holders(one.segments, 0)[:-1]
        ],
        "pins": [
            {
                "segment": segment.address, "segment_bytes": segment.size, "free_bytes": free,
                "holder": block.tag.holder, "modality": block.tag.modality,
                "block_bytes": block.size,
            }
            for segment, block, free in state.pinning_blocks(one.segments, reference)
        ],
    }  # fmt: skip
    return figures


def _conflict(found: Snapshot, one: _Device, profile: Profile) -> tuple[float, float | None]:
    """The device's conflict, and the seconds before the state that it is taken over (None: of
    the moment, because no times are recorded)."""
    memory = profile.memory
    life, start, end, window_s = None, 0.0, 0.0, None
    if one.program is not None and one.codes is not None and bool((one.codes > 0).any()):
        life, clock, timed = heat.lives(one.program, found.traces[one.number], one.codes)
        end = float(clock[min(one.event, len(clock) - 1)])
        if timed:
            window_s = min(memory.heat_window_s, end * MICROSECOND)
            start = end - window_s / MICROSECOND
        end += 1
    column = heat.region_conflicts(
        one.segments, life, start, end, memory.region_bytes, memory.reference_bytes
    )
    return state.mean_conflict(column), window_s


def _lifetimes(found: Snapshot, one: _Device) -> dict[str, Any]:
    """Per modality: how many lives ended in the trace, and how long these were."""
    import numpy as np

    if one.program is None or one.codes is None:
        return {}
    life, clock, timed = heat.lives(one.program, found.traces[one.number], one.codes)
    ended = (life.died <= int(clock[-1])) & (one.program.unit_entry >= 0)
    result = {}
    for name, code in heat.CODES.items():
        spans = (life.died - life.born)[ended & (life.code == code)]
        if len(spans):
            middle, high = np.quantile(spans, (0.5, 0.95)).tolist()
            result[name] = {
                "ended": len(spans),
                "p50_s": middle * MICROSECOND if timed else None,
                "p95_s": high * MICROSECOND if timed else None,
            }
    return result


def _timeline(found: Snapshot, one: _Device) -> dict[str, Any] | None:
    """Bytes of each modality over the trace: ``seconds`` from its first entry (shares of it
    where no times are recorded), and what each held then."""
    if one.program is None or one.codes is None:
        return None
    life, clock, timed = heat.lives(one.program, found.traces[one.number], one.codes)
    seconds, held = heat.timeline(life, int(clock[-1]), TIMELINE_POINTS)
    scale = MICROSECOND if timed else 1 / max(int(clock[-1]), 1)
    return {
        "timed": timed,
        "seconds": [second * scale for second in seconds],
        **{f"{name}_bytes": sizes for name, sizes in held.items()},
    }


def _capacity(one: _Device, options: Options) -> int | None:
    """What the device can give torch: said by the user, or what an error shows."""
    if options.capacity_bytes is not None:
        return options.capacity_bytes
    if one.program is None or not one.oom_segments:
        return None
    event, segments = one.oom_segments[0]
    figures = ooms.figures_at(one.program, event, segments, None)
    return sum(segment.size for segment in segments) + (figures.device_free_bytes or 0)


def _outcomes(one: _Device, confs: Sequence[Settings], options: Options) -> list[Outcome]:
    if one.program is None or one.codes is None or not (options.what_if or confs):
        return []
    requests = Requests(one.program, one.codes)
    in_force = one.program.settings
    both = {1, 2} <= set(one.codes.tolist())
    wanted = list(dict.fromkeys([in_force, *(confs or alternatives(in_force, both))]))
    capacity = _capacity(one, options)
    return [
        what_if(requests, settings, capacity, settings_in_all=len(wanted)) for settings in wanted
    ]


def alternatives(in_force: Settings, both_modalities: bool) -> list[Settings]:
    """Settings worth a replay beside those in force."""
    default = Settings()
    found = [
        msgspec.structs.replace(default, expandable_segments=not in_force.expandable_segments),
        parse("max_split_size_mb:256"),
        parse("roundup_power2_divisions:4"),
        parse("mmctl:lifetime_pool:True"),
    ]
    if both_modalities:
        found.append(parse("mmctl:pool_per_modality:True"))
    return found


def _ooms(one: _Device, outcomes: Sequence[Outcome], options: Options) -> list[ooms.Oom]:
    if one.program is None:
        return []
    # A setting avoided the error only if the replay of those in force meets it.
    met = any(outcome.in_force and outcome.oom for outcome in outcomes)
    others = [outcome for outcome in outcomes if met and not outcome.in_force]
    avoided = [outcome.setting for outcome in others if not outcome.oom]
    tried = [outcome.setting for outcome in others]
    return [
        ooms.describe(one.program, event, segments, options.capacity_bytes, avoided, tried)
        for event, segments in one.oom_segments
    ]


def _lint(found: Snapshot, devices: Sequence[_Device], confs: Sequence[Settings]) -> list[Lint]:
    largest = max((s.size for one in devices for s in one.segments), default=None)
    in_force = _settings(found, devices)
    remarks = lint(in_force, largest)
    for settings in confs:
        remarks += lint(settings, None, in_force)
    return remarks


def _settings(found: Snapshot, devices: Sequence[_Device]) -> Settings:
    """The settings in force: as recorded, or as the replay of a device inferred them."""
    programs = [one.program for one in devices if one.program is not None]
    return programs[0].settings if programs else found.settings


def _drawn(one: _Device, most_events: int | None) -> bool:
    if most_events is None or one.program is None:
        return most_events != 0
    return one.program.rows.shape[1] <= most_events


def _heatmap(found: Snapshot, one: _Device, profile: Profile) -> heat.Heatmap:
    memory = profile.memory
    if one.program is None or one.codes is None:
        return heat.from_state(
            one.number, one.segments, memory.region_bytes, memory.reference_bytes,
            memory.heat_rows,
        )  # fmt: skip
    return heat.from_trace(
        one.program, found.traces[one.number], one.tag_of, one.codes, memory.region_bytes,
        memory.reference_bytes, memory.heat_rows,
    )  # fmt: skip
