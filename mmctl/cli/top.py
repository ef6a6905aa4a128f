"""``mmctl top``: the dashboard, and one picture of it without a terminal."""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

from mmctl.cli import completion
from mmctl.cli.app import OUTPUTS, common, note, output, seconds, to_read, to_write
from mmctl.cli.main import Exit
from mmctl.cli.profile import checks
from mmctl.cli.render import emit
from mmctl.engine import profiles
from mmctl.engine.errors import MmctlError, UsageError, suggestion
from mmctl.engine.records import SCHEMA
from mmctl.engine.sources import demo, open_sources
from mmctl.engine.streams import time_ns
from mmctl.tui import SCREENS

PICTURES = ("svg", "text")
SIZE = "160x50"
SWITCH_S = 0.001  # a source that floods holds the interpreter no longer while a key waits


def top(
    sources: Annotated[list[str] | None, to_read()] = None,
    once: Annotated[
        bool, typer.Option("--once", help="One picture to standard output, no terminal needed.")
    ] = False,
    wait: Annotated[
        str,
        typer.Option(
            metavar="TIME", help="Wait so long for a source; with --once also watch it so long."
        ),
    ] = "2s",
    at: Annotated[
        str | None,
        typer.Option(metavar="TIME", help="With --once: a recording so long after its beginning."),
    ] = None,
    screen: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help=", ".join(SCREENS) + ".",
            autocompletion=completion.words(*SCREENS),
        ),
    ] = None,
    size: Annotated[
        str | None,
        typer.Option(metavar="COLSxROWS", help=f"With --once: its size; {SIZE} by default."),
    ] = None,
    mode: Annotated[
        str | None,
        typer.Option(
            metavar="MODE",
            help="Breaker: off, observe or enforce.",
            autocompletion=completion.words(*profiles.MODES),
        ),
    ] = None,
    theme: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help=", ".join(profiles.THEMES) + ".",
            autocompletion=completion.words(*profiles.THEMES),
        ),
    ] = None,
    record: Annotated[Path | None, to_write("Record everything to a file.")] = None,
    readonly: Annotated[
        bool, typer.Option("--readonly", help="Nothing on the screen can act on a server.")
    ] = False,
    ascii: Annotated[
        bool, typer.Option("--ascii", help="No character beyond ASCII in bars and marks.")
    ] = False,
) -> int:
    """The dashboard: devices, live conflict heatmap, events, recovery, schedule, traces.

    Keys: digits screens, arrows cursor, space pause, / filter (words, or a condition such as
    "sm_ratio < 5% and power_w > 300"), ? every key, q quit. A recording is played: < > speed,
    n p events, . and , steps, a click on the bar. T H R V trip, hold, reset or verify a device
    where the mode is enforce, M changes the mode and P the profile, each after a question.
    Figures are measured unless a line says modelled.

    --once draws one picture: a table of devices by default, the screen with -o svg and -o text,
    its data with json, ndjson and csv.

    \b
    Examples:
      mmctl top demo
      mmctl top nvml: http://127.0.0.1:8000/metrics
      mmctl top a17.ndjson.zst b3.ndjson.zst
      mmctl top nvml: --readonly --record shift.ndjson
      mmctl top run.ndjson --once --at 25s --size 120x40 -o text
      mmctl top demo:burst --once --wait 20s --screen heatmap -o svg > heatmap.svg
    """
    loaded = checks.loaded(common().profile)
    wanted = output(*PICTURES)
    for what, given, known in (
        ("screen", screen, tuple(SCREENS)), ("theme", theme, profiles.THEMES),
        ("mode", mode, profiles.MODES),
    ):  # fmt: skip
        if given is not None and given not in known:
            hint = suggestion(given, known)
            raise UsageError(f"unknown {what} '{given}': one of {', '.join(known)}{hint}")
    uris = list(sources or loaded.profile.sources.default)
    demo.check_live(uris, mode or loaded.profile.breaker.mode)
    named = tuple(uris)
    if mode is None:
        uris = [demo.stand_in(uri) for uri in uris]
    if str(record) in ("-", "/dev/stdout"):
        raise UsageError("--record: standard output is the screen's; name a file")
    if not once:
        if common().output is not None:
            raise UsageError(f"-o {wanted} is for one picture: add --once")
        if size is not None:
            raise UsageError("--size is for one picture: add --once")
        _need_terminal(uris)

    import msgspec

    from mmctl.tui import keys, state, view
    from mmctl.tui.lines import ASCII, UNICODE
    from mmctl.tui.model import Model
    from mmctl.tui.ui import Ui

    settings = loaded.profile
    chosen: Any = mode or settings.breaker.mode
    own = (one.keys for one in view.views().values())
    moved = keys.moved(settings.screen.keys, keys.every(own))
    kept = state.Remembered() if once else state.load()
    ui = Ui(
        now_ns=time.time_ns(), started_ns=time.time_ns(), live=_live(uris), sources=named,
        profile=loaded.name, mode=chosen, screen=screen or state.screen(kept, named),
        layer=kept.layer, level=kept.level,
        vision_deadline_s=settings.schedule.vision_deadline_s,
        stream_deadline_s=settings.schedule.stream_deadline_s,
        glyphs=ASCII if ascii or settings.screen.ascii else UNICODE,
    )  # fmt: skip
    dress = theme or (kept.theme if kept.theme in profiles.THEMES else settings.screen.theme)
    wait_s = seconds("--wait", wait, zero=True)
    sought = _sought(uris, loaded, chosen if mode else None, readonly, once, wait_s)

    def model() -> Model:
        return Model(settings.memory.heat_window_s, chosen)

    ui = msgspec.structs.replace(ui, notice=sought.notice)
    if once:
        if at is not None:
            sought = sought._replace(records=_until(sought.records, seconds("--at", at, zero=True)))
        return _once(sought, model(), ui, wait_s, _size(size or SIZE), dress, wanted)
    return _watch(sought, model, ui, dress, moved, record)


top.formats = (*OUTPUTS, *PICTURES)  # type: ignore[attr-defined]


class Sought(NamedTuple):
    """What is to be shown: its records, how to end them, and what can be done about them."""

    records: Iterable[Any]
    stop: threading.Event
    playback: Any = None
    orders: Any = None
    notice: str | None = None
    refuses: str = ""


def _sought(
    uris: list[str], loaded: profiles.Loaded, mode: profiles.Mode | None, readonly: bool,
    once: bool, wait_s: float,
) -> Sought:  # fmt: skip
    """Live sources with the breaker between; recordings as they were, unless to be decided anew."""
    from mmctl.tui.orders import Orders
    from mmctl.tui.playback import Playback

    stop, profile = threading.Event(), loaded.profile
    if mode is not None or _live(uris):
        records = open_sources(uris, profile, stop, wait_s=wait_s)
        enforces = (mode or profile.breaker.mode) == "enforce"
        acts = _live(uris) and not readonly and (not once or enforces)
        store, told = _store(uris) if acts else (None, None)
        acts = acts and told is None
        orders = Orders(loaded, common().profile, mode)
        decided = orders.decided(records, store, acts=acts)
        refuses = told or (
            "--readonly was given: nothing here acts on a server"
            if _live(uris) else "a recording is shown: it takes no order"
        )  # fmt: skip
        return Sought(decided, stop, None, orders if acts else None, told, refuses)
    if once:
        return Sought(open_sources(uris, profile, stop), stop)
    playback = Playback([Path(uri) for uri in uris], stop, 1.25 * profile.memory.heat_window_s)
    refuses = "a recording is shown: it takes no order"
    return Sought(playback.records(), stop, playback, refuses=refuses)


def _store(uris: list[str]) -> tuple[Any, str | None]:
    """The breaker's audit log and state; or why another one has them, and acts alone."""
    from mmctl.engine.breaker.store import Store

    lasting = not any(uri.partition(":")[0] in ("demo", "-") for uri in uris)
    try:
        return Store(restore=lasting), None
    except MmctlError as error:
        return None, f"{error}: this screen only watches"


def _watch(
    sought: Sought, model: Callable[[], Any], ui: Any, theme: str, moved: dict[str, str],
    record: Path | None,
) -> int:  # fmt: skip
    from mmctl.tui import state
    from mmctl.tui.app import Top
    from mmctl.tui.feed import Feed

    feeds: list[Feed] = []

    def start(app: Top) -> Feed:
        feed = Feed(
            sought.records, model, sought.stop,
            fresh=lambda snapshot: app.post_message(Top.Fresh(snapshot)),
            ended=lambda error: app.post_message(Top.Ended(error)),
        )  # fmt: skip
        feeds.append(feed)
        feed.start()
        return feed

    if not common().color:
        os.environ["NO_COLOR"] = "1"  # what Textual looks at
    sys.setswitchinterval(SWITCH_S)
    app = Top(
        ui, started=start, playback=sought.playback, record=record, theme_name=theme, keys=moved,
        orders=sought.orders, refuses=sought.refuses, signals=True,
    )  # fmt: skip
    say, remarks = warnings.showwarning, []
    warnings.showwarning = lambda *remark, **_: remarks.append(remark)  # the screen is drawn on
    try:
        code = app.run()
        enforces = (app.snapshot.mode or ui.mode) == "enforce" and sought.orders is not None
        if app.broken is not None and enforces and feeds:
            _go_on(feeds[0], app.broken)
    finally:
        warnings.showwarning = say
        for remark in remarks:
            say(*remark)
        if feeds and not feeds[0].close(timeout_s=5.0):
            note("mmctl: a source did not stop in 5 s and was left behind")
    screens = state.at_screen(state.load(), app.ui.sources, app.ui.screen)
    state.save(state.Remembered(screens, app.theme, app.ui.layer, app.ui.level))
    if app.error is not None:
        raise app.error
    return Exit.FAILED if code is None else code


def _go_on(feed: Any, error: BaseException) -> None:
    """The screen has failed, and what it enforces goes on: events are printed until Ctrl+C."""
    from mmctl.cli.breaker.lines import LineWriter

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(Exit.TERMINATED))
    note(f"mmctl: the screen has failed ({type(error).__name__}: {error}); the breaker goes on in "
         "mode enforce and prints its events here; Ctrl+C ends it")  # fmt: skip
    feed.outlive(LineWriter("table").write)


def _once(
    sought: Sought, model: Any, ui: Any, wait_s: float, size: tuple[int, int], theme: str,
    wanted: str,
) -> int:  # fmt: skip
    import msgspec

    timer = threading.Timer(wait_s, sought.stop.set)
    if ui.live:
        timer.daemon = True
        timer.start()
    try:
        for record in sought.records:
            model.add(record)
    finally:
        timer.cancel()
        sought.stop.set()
    snapshot = model.snapshot()
    ui = msgspec.structs.replace(ui, now_ns=time.time_ns())
    if wanted in PICTURES:
        from mmctl.tui.once import draw

        svg, text = draw(snapshot, ui, size, theme)
        sys.stdout.write(svg if wanted == "svg" else text)
        return Exit.DONE
    rows = [msgspec.to_builtins(view.record) for view in snapshot.devices]
    document = {
        "schema": SCHEMA,
        "newest_ns": snapshot.newest_ns,
        "nodes": snapshot.nodes,
        "mode": snapshot.mode,
        "state": snapshot.state,
        "devices": rows,
        "serving": [msgspec.to_builtins(view.record) for view in snapshot.serving],
        "pools": [msgspec.to_builtins(view.record) for view in snapshot.pools],
        "events": [msgspec.to_builtins(event) for event in snapshot.events],
    }
    table = None
    if wanted == "table":
        from mmctl.tui.lines import plain
        from mmctl.tui.overview import devices

        table = "\n".join(plain(line).rstrip() for line in devices(snapshot, ui, size[0]))
    emit(document, rows, wanted, table=table)
    return Exit.DONE


def _until(records: Iterable[Any], seconds: float) -> Iterator[Any]:
    """Records of the first so many seconds."""
    end = 0
    for record in records:
        ts_ns = time_ns(record)
        end = end or ts_ns + int(seconds * 1e9)
        if ts_ns > end:
            return
        yield record


def _live(uris: list[str]) -> bool:
    """Whether the records are of now: a file tells of another time."""
    return not all(Path(uri).exists() for uri in uris)


def _need_terminal(uris: list[str]) -> None:
    """UsageError where there is no terminal; a piped source leaves its keyboard at /dev/tty."""
    once = "for one picture without it: mmctl top --once -o text"
    if not (sys.stdout.isatty() and sys.stderr.isatty()):
        raise UsageError(f"the dashboard needs a terminal; {once}")
    if os.environ.get("TERM", "") in ("", "dumb"):
        raise UsageError(f"the terminal '{os.environ.get('TERM', '')}' cannot be drawn on; {once}")
    if sys.stdin.isatty():
        return
    if "-" not in uris:
        raise UsageError(f"the dashboard needs a keyboard, and stdin is no terminal; {once}")
    try:
        keyboard = os.open("/dev/tty", os.O_RDWR)
    except OSError:
        raise UsageError(f"the dashboard needs a terminal for its keys; {once}") from None
    piped = os.dup(sys.stdin.fileno())
    os.dup2(keyboard, sys.stdin.fileno())
    os.close(keyboard)
    sys.stdin = os.fdopen(piped)


def _size(given: str) -> tuple[int, int]:
    found = re.fullmatch(r"(\d{1,4})[x×](\d{1,4})", given)
    if not found or not (int(found[1]) and int(found[2])):
        raise UsageError(f"'{given}' is no size such as 160x50")
    return int(found[1]), int(found[2])
