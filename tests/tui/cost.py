"""What the dashboard costs, beside one bare heatmap widget: ``python tests/tui/cost.py``.

Both draw a 40×70 heatmap that changes wholly ten times a second into a real pseudo-terminal;
the dashboard has eight devices and all its other lines beside it. Prints shares of a core as CPU
time over wall time, their quotient, and resident memory.
"""

from __future__ import annotations

import json
import os
import pty
import select
import subprocess
import sys
import threading
import time
from pathlib import Path

HERE = Path(__file__)
SIZE = (110, 50)  # leaves the heatmap 40 rows and somewhat more than 70 columns
SECONDS = float(os.environ.get("MMCTL_COST_S", "8"))
HZ = 10


def bare() -> None:
    """One widget of 40×70 cells, a segment a cell, and nothing else."""
    import random

    from rich.segment import Segment
    from rich.style import Style
    from textual.app import App
    from textual.strip import Strip
    from textual.widget import Widget

    inks = [Style(bgcolor=f"#{i * 16:02x}3060") for i in range(16)]
    random.seed(1)
    frames = [[[random.randrange(16) for _ in range(70)] for _ in range(40)] for _ in range(8)]

    class Bare(Widget):
        DEFAULT_CSS = "Bare { width: 70; height: 40; }"
        frame = 0

        def render_line(self, y: int) -> Strip:
            if y >= 40:
                return Strip.blank(70)
            return Strip([Segment("░", inks[c]) for c in frames[self.frame % 8][y]], 70)

    class Shown(App[None]):
        def compose(self):
            yield Bare()

        def on_mount(self) -> None:
            self.set_interval(1 / HZ, self.tick)
            self.set_timer(1.0, self.begin)
            self.set_timer(1.0 + SECONDS, self.finish)

        def tick(self) -> None:
            widget = self.query_one(Bare)
            widget.frame += 1
            widget.refresh()

        def begin(self) -> None:
            self.start = (time.process_time(), time.monotonic())

        def finish(self) -> None:
            self.exit()
            report(self.start)

    Shown().run()


def whole() -> None:
    """The dashboard over eight devices, its heatmap on the screen."""
    import msgspec
    import scenes

    from mmctl.tui.app import Top
    from mmctl.tui.feed import Feed
    from mmctl.tui.model import Model
    from mmctl.tui.ui import Ui

    stop = threading.Event()
    ready = []
    for tick in range(HZ * 8):  # made before, so that making them is not counted
        second = tick / HZ * 20  # so fast that every column differs
        batch = [scenes.gpu(second, 0, index) for index in range(8)]
        pools = [scenes.pool(second, 0, f"gpu{index}") for index in range(8)]
        ready.append([*batch, *pools, scenes.engine(second, 0)])

    def records():
        for tick in range(10**9):
            if stop.wait(1 / HZ):
                return
            for record in ready[tick % len(ready)]:
                yield msgspec.structs.replace(record, ts_ns=time.time_ns())

    def start(app: Top) -> None:
        Feed(
            records(), lambda: Model(heat_window_s=12.0), stop,
            fresh=lambda s: app.post_message(Top.Fresh(s)),
            ended=lambda e: app.post_message(Top.Ended(e)),
        ).start()  # fmt: skip
        begun = []
        app.set_timer(2.0, lambda: begun.append((time.process_time(), time.monotonic())))
        app.set_timer(2.0 + SECONDS, lambda: (stop.set(), app.exit(0), report(begun[0])))

    screen = os.environ.get("MMCTL_COST_SCREEN", "heatmap")
    Top(Ui(screen=screen, sources=("made",), level=1), started=start, signals=True).run()


def report(start: tuple[float, float]) -> None:
    from mmctl.tui.cost import resident_bytes

    share = (time.process_time() - start[0]) / (time.monotonic() - start[1])
    Path(os.environ["MMCTL_COST_OUT"]).write_text(
        json.dumps({"core_ratio": share, "resident_bytes": resident_bytes()})
    )


def measured(what: str, out: Path) -> dict[str, float]:
    """Run one of the two in a pseudo-terminal that is read to the end."""
    master, slave = pty.openpty()
    os.set_inheritable(slave, True)
    import fcntl
    import struct
    import termios

    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", SIZE[1], SIZE[0], 0, 0))
    environment = {
        **os.environ, "MMCTL_COST_OUT": str(out), "TERM": "xterm-256color",
        "COLORTERM": "truecolor", "PYTHONPATH": f"{HERE.parents[2]}:{HERE.parent}",
    }  # fmt: skip
    child = subprocess.Popen(
        [sys.executable, str(HERE), what], stdin=slave, stdout=slave, stderr=slave,
        env=environment, start_new_session=True,
    )  # fmt: skip
    os.close(slave)
    written = 0
    while child.poll() is None:
        if select.select([master], [], [], 0.2)[0]:
            try:
                written += len(os.read(master, 1 << 16))
            except OSError:
                break
    child.wait()
    os.close(master)
    return {**json.loads(out.read_text()), "terminal_bytes": written}


def main() -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        found = {what: measured(what, Path(folder) / what) for what in ("bare", "whole")}
    for what, given in found.items():
        print(
            f"{what:6} {100 * given['core_ratio']:5.1f}% of a core,"
            f" {given['resident_bytes'] / 2**20:5.1f} MiB,"
            f" {given['terminal_bytes'] / SECONDS / 1024:6.0f} KiB/s to the terminal"
        )
    print(f"whole / bare {found['whole']['core_ratio'] / found['bare']['core_ratio']:.2f}")


if __name__ == "__main__":
    {"bare": bare, "whole": whole, "": main}[sys.argv[1] if len(sys.argv) > 1 else ""]()
