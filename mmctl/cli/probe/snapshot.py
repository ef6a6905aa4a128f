"""``mmctl probe snapshot``: the truth about a pool, from a file."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mmctl.cli.app import common, may_write, note, output, quantity, to_write
from mmctl.cli.main import Exit
from mmctl.cli.render import emit, to_table
from mmctl.engine import atomic, profiles
from mmctl.engine.errors import MmctlError, UsageError
from mmctl.engine.memory.causes import VARIABLE
from mmctl.engine.units import show_bytes, show_seconds

if TYPE_CHECKING:
    from mmctl.engine.memory.report import Report

GOOD_ENDINGS = (".svg", ".png")
LONG_BYTES = 30_000_000
DRAWN_EVENTS = 200_000  # a table shows the heatmap of shorter traces unasked


def _size(text: str | None, flag: str) -> int | None:
    if text is None:
        return None
    size = int(quantity(flag, text, "bytes"))
    if size <= 0:
        raise UsageError(f"{flag} must be more than nothing, not {text}")
    return size


def snapshot(
    file: Annotated[
        str, typer.Argument(metavar="FILE|-", help="A snapshot, or a log with torch's message.")
    ],
    what_if: Annotated[
        bool, typer.Option("--what-if/--no-what-if", help="Replay under other settings.")
    ] = True,
    conf: Annotated[
        list[str] | None,
        typer.Option(
            "--conf",
            metavar="K:V,…",
            help="Settings to replay instead of the usual ones (repeatable): torch's names, and "
            "mmctl:pool_per_modality:True, mmctl:lifetime_pool:True.",
        ),
    ] = None,
    capacity: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="What the device has, such as 16GiB, for --what-if."),
    ] = None,
    heatmap: Annotated[
        Path | None,
        to_write("Write the conflict heatmap: .svg, or .png."),
    ] = None,
    at: Annotated[
        int | None,
        typer.Option("--at", metavar="ENTRY", help="Show the state before this trace entry."),
    ] = None,
    max_size: Annotated[str, typer.Option(metavar="SIZE", help="Refuse a larger file.")] = "4GiB",
    max_entries: Annotated[
        int, typer.Option(metavar="N", min=1, help="Refuse more entries, blocks and frames.")
    ] = 20_000_000,
    max_depth: Annotated[
        int, typer.Option(metavar="N", min=1, help="Refuse deeper stacks.")
    ] = 1000,
) -> int:
    """State, exact replay, out-of-memory causes and what-if of a PyTorch memory snapshot.

    FILE comes from torch.cuda.memory._dump_snapshot (torch 2.0 or later; a bare list of
    segments does) or is a text with torch's out-of-memory message. It is opened as a
    stranger's: no code in it runs, its process has limited memory.

    Figures of the state and of the replay are measured, those of --what-if are modelled: the
    same requests under other rules. Exits with 3 when there is an out-of-memory error or a
    false free (enough bytes free, no block large enough).

    \b
    Examples:
      mmctl probe snapshot dump.pickle
      mmctl probe snapshot dump.pickle -o json --no-what-if
      mmctl probe snapshot dump.pickle --conf expandable_segments:True --capacity 16GiB
      mmctl probe snapshot dump.pickle --heatmap conflict.svg
      grep -A3 'out of memory' server.log | mmctl probe snapshot -
    """
    wanted = output()
    if heatmap is not None and heatmap.suffix.lower() not in GOOD_ENDINGS:
        raise UsageError(f"--heatmap writes {' or '.join(GOOD_ENDINGS)}, not '{heatmap.suffix}'")
    from mmctl.engine.memory.report import Options
    from mmctl.engine.untrusted import Limits

    profile = profiles.load(common().profile).profile
    options = Options(
        what_if=what_if,
        confs=tuple(conf or ()),
        capacity_bytes=_size(capacity, "--capacity"),
        at=at,
        heatmap_events=None if heatmap is not None else DRAWN_EVENTS if wanted == "table" else 0,
        limits=Limits(
            max_bytes=_size(max_size, "--max-size") or 0,
            max_entries=max_entries,
            max_depth=max_depth,
        ),
    )
    report = _read(file, profile, options)
    if heatmap is not None:
        _write_heatmaps(heatmap, report)
    table = _table(report) if wanted == "table" else None
    emit(report.document, _rows(report.document), wanted, table=table)
    return Exit.FINDING if report.finding else Exit.DONE


def _read(file: str, profile: Any, options: Any) -> Report:
    from mmctl.engine.memory.report import of_file

    if file != "-":
        path = Path(file)
        if sys.stderr.isatty() and path.is_file() and path.stat().st_size > LONG_BYTES:
            note("a long trace: the first one of these with --what-if compiles, once")
        return of_file(path, profile, options)
    # Standard input may be a pickle, whose child process needs a file to open.
    with tempfile.NamedTemporaryFile(prefix="mmctl-") as copy:
        left = options.limits.max_bytes
        while part := sys.stdin.buffer.read(1 << 20):
            left -= len(part)
            if left < 0:
                raise MmctlError("standard input holds more than allowed: raise --max-size")
            copy.write(part)
        if left == options.limits.max_bytes:
            raise MmctlError("standard input is empty: give a snapshot or torch's message")
        copy.flush()
        try:
            report = of_file(Path(copy.name), profile, options)
        except MmctlError as error:
            said = str(error).replace(copy.name, "standard input")
            raise type(error)(said) from None
    report.document["file"] = "-"
    return report


def _write_heatmaps(path: Path, report: Report) -> None:
    """One file; with several devices, one each: ``name-0.svg``, ``name-1.svg``."""
    from mmctl.engine.memory import draw

    if not report.heatmaps:
        raise MmctlError("there is no heatmap of a message: it names no addresses")
    for one in report.heatmaps:
        several = len(report.heatmaps) > 1
        target = path.with_stem(f"{path.stem}-{one.device}") if several else path
        may_write(target)
        if path.suffix.lower() == ".png":
            atomic.write(target, draw.png(one))
        else:
            atomic.write(target, draw.svg(one))
        note(f"wrote {target}")


def _rows(document: dict[str, Any]) -> list[dict[str, Any]]:
    """One row per device (or per message): the figures that are single values."""
    rows = []
    for device in document["devices"]:
        row = {key: value for key, value in device.items() if not isinstance(value, (list, dict))}
        row |= {f"{name}_bytes": size for name, size in device["modalities"].items()}
        row |= {f"{name}_stranded_bytes": n for name, n in device["stranded_bytes"].items()}
        row |= {f"{name}_pages": n for name, n in device["pages"].items()}
        errors = [one for one in document["oom"] if one["device"] == device["device"]]
        row["oom_cause"] = errors[-1]["cause"] if errors else None
        rows.append(row)
    if rows:
        return rows
    keep = ("entry", "device", "requested_bytes", "device_free_bytes", "free_bytes", "cause",
            "short_bytes", "explanation")  # fmt: skip
    return [{key: one[key] for key in keep} for one in document["oom"]]


def _table(report: Report) -> str:
    from mmctl.engine.memory import draw

    document = report.document
    blocks = [_head(document)]
    if document["devices"]:
        blocks.append(to_table([_device_row(device) for device in document["devices"]]))
        pools = [
            {"device": device["device"], **_pool_row(pool)}
            for device in document["devices"]
            for pool in device["pools"]
        ]
        if len(pools) > len(document["devices"]):
            blocks.append("Pools\n" + to_table(pools))
        blocks += [_who(device) for device in document["devices"]]
    place = "entry" if document["era"] else "line"
    blocks += [_oom_text(one, place) for one in document["oom"]]
    if document["what_if"]:
        rows = [_outcome_row(one) for one in document["what_if"]]
        blocks.append("What if (modelled)\n" + to_table(rows) + f"\n{_how_to_set(rows)}")
    blocks += [f"lint: {one['message']}" for one in document["lint"]]
    blocks += [draw.text(one) for one in report.heatmaps if any(map(any, one.cells))]
    return "\n\n".join(block for block in blocks if block)


def _head(document: dict[str, Any]) -> str:
    replay = document["replay"]
    if replay is None:
        said = f"no replay: {document['replay_absent']}"
    else:
        said = (
            f"replay: {replay['exact']} of {replay['allocs']} addresses exact, "
            f"{replay['exact_segments']} of {replay['segments']} segments, "
            f"final state {'equal' if replay['final_equal'] else 'different'}"
        )
    era = document["era"]  # later versions write the same, as long as nothing is added
    written = f"format of torch {era} or later · {document['settings']} · " if era else ""
    return f"{document['file']} · {written}{said}"


def _device_row(device: dict[str, Any]) -> dict[str, Any]:
    pages = device["pages"]
    return {
        "device": device["device"],
        "reserved": show_bytes(device["reserved_bytes"]),
        "allocated": show_bytes(device["allocated_bytes"]),
        "pending": show_bytes(device["pending_bytes"]),
        "free": show_bytes(device["free_bytes"]),
        "largest": show_bytes(device["largest_free_bytes"]),
        "releasable": show_bytes(device["releasable_bytes"]),
        "frag": f"{device['fragmentation_ratio']:.2f}",
        "conflict": f"{device['conflict_ratio']:.2f}",
        "segments": device["segments"],
        "blocks": device["blocks"],
        "pages used/partial/free": f"{pages['used']}/{pages['partial']}/{pages['free']}",
    }


def _pool_row(pool: dict[str, Any]) -> dict[str, Any]:
    return {
        "pool": pool["pool"],
        "stream": pool["stream"],
        "reserved": show_bytes(pool["reserved_bytes"]),
        "free": show_bytes(pool["free_bytes"]),
        "largest": show_bytes(pool["largest_free_bytes"]),
        "frag": f"{pool['fragmentation_ratio']:.2f}",
        "false_free": pool["false_free"],
    }


def _who(device: dict[str, Any]) -> str:
    lines = []
    for name, size in device["modalities"].items():
        life = device["lifetimes"].get(name)
        text = f"  {name:<7}{show_bytes(size):>10}"
        if name in device["stranded_bytes"]:
            text += f"   strands {show_bytes(device['stranded_bytes'][name])}"
        if life and life["p50_s"] is not None:
            text += f"   lives {show_seconds(life['p50_s'])} (p95 {show_seconds(life['p95_s'])})"
        lines.append(text)
    lines += [
        f"  {show_bytes(one['bytes']):>10}  {one['modality'] or '':<7}{one['holder']}"
        for one in device["holders"][:5]
    ]
    lines += [
        f"  pinned: segment {one['segment']:#x} ({show_bytes(one['free_bytes'])} free) by "
        f"{show_bytes(one['block_bytes'])} of {one['holder'] or 'an unknown place'}"
        for one in device["pins"][:3]
    ]
    return f"Device {device['device']} is held by\n" + "\n".join(lines)


def _oom_text(one: dict[str, Any], place: str) -> str:
    where = f"device {one['device']}" if one["device"] is not None else "a device that is not told"
    return (
        f"Out of memory on {where} at {place} {one['entry']}: cause {one['cause']}\n"
        f"  {one['explanation']}"
    )


def _how_to_set(rows: list[dict[str, Any]]) -> str:
    said = (
        f"Set one before the process starts: {VARIABLE}=SETTING. Every torch reads this name; the "
        "newer PYTORCH_ALLOC_CONF does not reach every setting in torch 2.9."
    )
    if any("mmctl:" in row["setting"] for row in rows):
        said += (
            "\nmmctl:… is modelled only, torch has no such setting; a torch.cuda.MemPool around "
            "the work of one modality comes nearest."
        )
    return said


def _outcome_row(one: dict[str, Any]) -> dict[str, Any]:
    low, high = one["peak_reserved_spread"]
    return {
        "device": one["device"],
        "setting": one["setting"] + (" (in force)" if one["in_force"] else ""),
        "peak": show_bytes(one["peak_reserved_bytes"]),
        "spread": f"{show_bytes(low)} to {show_bytes(high)}" if low != high else "",
        "largest free at peak": show_bytes(one["largest_free_at_peak_bytes"]),
        "device allocs": one["device_allocs"],
        "capacity": show_bytes(one["capacity_bytes"]),
        "oom": one["oom"],
    }
