"""The allocation hook against a small fake CUDA runtime and driver."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from mmctl import native
from mmctl.engine import profiles
from mmctl.engine.breaker.hook_rule import compile_rule, hook_rules
from mmctl.engine.errors import UsageError
from mmctl.engine.rules.rule import compile_rules
from mmctl.native import layout

HERE = Path(__file__).parent
MIB = 2**20

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The fake libraries and the programs that use them."""
    folder = tmp_path_factory.mktemp("fake")

    def cc(*arguments: str) -> None:
        subprocess.run(["cc", "-O2", *arguments], check=True, cwd=folder)

    fake = str(HERE / "fake_cudart.c")
    cc("-shared", "-fPIC", "-Wl,-soname,libcudart.so.13", "-o", "libcudart.so.13", fake)
    cc("-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", "libcuda.so.1", fake)
    cc("-shared", "-fPIC", "-o", "second.so", str(HERE / "second_hook.c"), "-ldl")
    link = [str(folder / "libcudart.so.13"), f"-Wl,-rpath,{folder}", "-ldl", "-lpthread"]
    app = str(HERE / "app.c")
    cc('-DFAKE="libcudart.so.13"', "-o", "app", app, *link)
    cc(
        "-shared",
        "-fPIC",
        "-Dmain=app_main",
        '-DFAKE="libcudart.so.13"',
        "-o",
        "app.so",
        app,
        *link,
    )
    return folder


class App:
    """The program under the hook, fed line by line."""

    def __init__(self, folder: Path, control: layout.Control | None, **more: str) -> None:
        self.folder = layout.folder()
        self.folder.mkdir(parents=True, exist_ok=True)
        environment = {
            **os.environ,
            "LD_PRELOAD": more.pop("preload", str(native.library("hook"))),
            "LD_LIBRARY_PATH": str(folder), "MMCTL_HOOK_FOLDER": str(self.folder), **more,
        }  # fmt: skip
        if control is not None:
            environment["MMCTL_HOOK_CONTROL"] = str(control.path)
        self.process = subprocess.Popen(
            [str(folder / "app")], env=environment, text=True, bufsize=1,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip

    def do(self, word: str, number: int = 0) -> str:
        assert self.process.stdin and self.process.stdout
        self.process.stdin.write(f"{word} {number}\n")
        return self.process.stdout.readline().strip()

    def state(self) -> layout.StateFile:
        return layout.StateFile(self.path)

    @property
    def path(self) -> Path:
        return self.folder / f"hook-{self.process.pid}"

    def end(self) -> tuple[int, str]:
        _, errors = self.process.communicate()
        return self.process.returncode, errors


@pytest.fixture
def control(tmp_path: Path) -> Iterator[layout.Control]:
    made = layout.Control(tmp_path / "control")
    yield made
    made.close()


def rule(when: str, mode: str = "enforce", max_age_s: float = 60.0) -> layout.HookRule:
    (read,) = compile_rules([profiles.Rule(name="r", when=when, max_age_s=max_age_s)])
    return compile_rule(read, mode)  # type: ignore[arg-type]


def test_layout_is_that_of_the_c_source() -> None:
    library = ctypes.CDLL(str(native.library("hook")))
    found = (ctypes.c_uint64 * len(layout.LAYOUT)).in_dll(library, "mmctl_layout")
    assert tuple(found) == layout.LAYOUT


def test_the_map_of_segments_and_the_counters(built: Path) -> None:
    app = App(built, None)
    assert [app.do("malloc", 2 * MIB), app.do("device", 1), app.do("async", 3 * MIB)] == ["0"] * 3
    assert [app.do("malloc", 100 * MIB), app.do("free", 0), app.do("info")] == ["2", "0", "0"]
    state = app.state()
    counters = state.counters()
    assert (counters.reserved_bytes, counters.peak_bytes) == (3 * MIB, 5 * MIB)
    assert (counters.total_bytes, counters.free_bytes) == (64 * MIB, 61 * MIB)
    assert [app.do("pool", 1), app.state().counters().pool_reserved_bytes] == ["1", 0]
    assert app.do("pool", 7) == "0", "one of the two brings the other"
    counters = state.counters()
    assert (counters.pool_reserved_bytes, counters.pool_used_bytes) == (7 * MIB, 3 * MIB)
    assert [(size, device) for _, size, device in state.segments()] == [(3 * MIB, 1)]
    events, head, lost = state.events(0)
    assert [event.action for event in events] == [
        "segment_alloc", "segment_alloc", "oom", "segment_free",
    ]  # fmt: skip
    assert (events[1].device, events[1].stream, head, lost) == (1, 7, 4, 0)
    assert app.end() == (7, "") and not app.path.exists(), "the state goes with the process"


def test_refusing_counts_trips_not_calls_and_follows_new_rules(
    built: Path, control: layout.Control
) -> None:
    control.write("enforce", [rule("size_bytes > 4MiB and vision_tokens > 512")])
    app = App(built, control)
    assert app.do("malloc", 8 * MIB) == "0", "no tokens are known: unknown, never true"
    control.give("vision_tokens", 600.0, time.time_ns())
    assert [app.do("malloc", 8 * MIB) for _ in range(3)] == ["2"] * 3
    assert app.do("malloc", 2 * MIB) == "0"
    counters = app.state().counters()
    assert (counters.trips, counters.refused_calls, counters.would_trips) == (1, 3, 0)
    control.write("observe", [rule("size_bytes > 4MiB and vision_tokens > 512")])
    assert app.do("malloc", 9 * MIB) == "0" and app.state().counters().would_trips == 1
    control.write("enforce", [rule("size_bytes > 4MiB and vision_tokens > 700")])
    assert app.do("malloc", 9 * MIB) == "0" and app.state().counters().trips == 1
    control.give("vision_tokens", 800.0, time.time_ns() - 120 * 10**9)
    assert app.do("malloc", 9 * MIB) == "0", "stale tokens are unknown"
    control.write("off", [rule("size_bytes > 1")])
    assert app.do("malloc", 9 * MIB) == "0"
    app.end()


@pytest.mark.parametrize("way", ["entry", "dlsym", "proc"])
def test_virtual_memory_is_seen_however_the_function_was_found(
    built: Path, control: layout.Control, way: str
) -> None:
    control.write("enforce", [rule("size_bytes > 16MiB")])
    app = App(built, control)
    assert [app.do(way, 4 * MIB), app.do(way, 20 * MIB)] == ["0", "2"]
    events, _, _ = app.state().events(0)
    assert [(event.action, event.size_bytes) for event in events] == [
        ("map", 4 * MIB), ("refused", 20 * MIB),
    ]  # fmt: skip
    app.end()


def test_threads_fork_and_a_process_without_cuda(built: Path) -> None:
    app = App(built, None)
    assert not app.path.exists(), "no CUDA call yet, no trace"
    assert app.do("threads", 8) == "0"
    assert app.state().counters().segments == 0 and app.state().counters().calls == 8000
    assert app.do("malloc", MIB) == "0"
    assert app.do("fork", MIB) == "0", "the child has a state of its own"
    assert app.state().counters().segments == 1
    assert app.end()[0] == 7
    done = subprocess.run(
        ["/bin/echo", "fine"], capture_output=True, text=True,
        env={**os.environ, "LD_PRELOAD": str(native.library("hook"))},
    )  # fmt: skip
    assert (done.stdout, done.stderr) == ("fine\n", "")


def test_a_second_hook_and_a_library_loaded_for_itself(built: Path) -> None:
    hook = native.library("hook")
    for order in (f"{built}/second.so:{hook}", f"{hook}:{built}/second.so"):
        app = App(built, None, preload=order)
        assert app.do("malloc", MIB) == "0"
        assert app.state().counters().calls == 1
        assert app.end() == (7, "second saw 1\n")
    # Python loads extensions, and with them their CUDA runtime, for themselves alone.
    script = f"import ctypes; ctypes.CDLL('{built}/app.so', 0).app_main(1, None)"
    environment = {
        **os.environ, "LD_PRELOAD": str(hook), "MMCTL_HOOK_FOLDER": str(layout.folder()),
    }  # fmt: skip
    done = subprocess.run(
        ["python3", "-c", script], input="malloc 1048576\nmalloc 99999999\n", text=True,
        capture_output=True, env=environment,
    )  # fmt: skip
    assert done.stdout == "0\n2\n", done.stderr


def test_what_the_hook_costs_is_printed(
    built: Path, control: layout.Control, capsys: pytest.CaptureFixture[str]
) -> None:
    paper = profiles.load("paper").profile
    control.write("enforce", hook_rules(paper, "enforce"))
    for signal in ("fragmentation_ratio", "vision_tokens", "text_tokens"):
        control.give(signal, 0.9 if signal == "fragmentation_ratio" else 600.0, 2**62)
    app = App(built, control)
    bare, hooked, one = map(float, app.do("bench", 100_000).split())
    app.end()
    with capsys.disabled():
        print(f"\nhook: malloc and free {bare:.0f} ns bare, {hooked:.0f} hooked; rule {one:.1f} ns")
    assert hooked > bare and one > 0


def test_what_the_hook_cannot_evaluate_is_said_and_left_out() -> None:
    for when in ("mean(size_bytes, 3s) > 1", "size_bytes > 1 and fits_cause == 'x'",
                 "size_bytes > temperature_c"):  # fmt: skip
        with pytest.raises(UsageError):
            rule(when)
    profile = profiles.load("default").profile
    assert [found.name for found in hook_rules(profile, "enforce")] == ["alloc_conflict"]
    assert hook_rules(profile, "enforce")[0].mode == "observe", "a rule's own mode caps the run's"


def test_compiled_rules_agree_with_the_language(built: Path, control: layout.Control) -> None:
    whens = {
        "size_bytes > 4MiB or vision_tokens > 5": False,
        "size_bytes + 1MiB > 2MiB and not (vision_tokens > 5)": True,
        "size_bytes >= 1.5MiB and (vision_tokens == 3 or kv_ratio > 0.5)": True,
        "size_bytes > 1MiB and kv_ratio > 0.5": False,
        "-size_bytes < -1MiB and size_bytes * 2 / vision_tokens > 0.9MiB": True,
        "1MiB < size_bytes and vision_tokens != 3": False,
    }
    app = App(built, control)
    control.give("vision_tokens", 3.0, time.time_ns())
    for when, refused in whens.items():
        control.write("enforce", [rule(when)])
        assert app.do("malloc", round(1.5 * MIB)) == ("2" if refused else "0"), when
    app.end()


def test_breaker_run_and_the_hook_source(built: Path, tmp_path: Path, mmctl) -> None:
    profile = tmp_path / "p.toml"
    profile.write_text(
        'extends = "default"\n[breaker]\ninherit_rules = false\n[[breaker.rules]]\n'
        'name = "big"\nwhen = "size_bytes > 32MiB"\n'
    )
    script = (
        f"(echo malloc 1048576; echo malloc 40000000; sleep 0.6; "
        f'mmctl() {{ python3 -m mmctl "$@"; }}; echo malloc 2097152; sleep 1) | {built}/app'
    )
    environment = {**os.environ, "LD_LIBRARY_PATH": str(built)}
    done = mmctl(
        "breaker", "run", "--profile", str(profile), "--mode", "enforce", "--", "bash", "-c",
        script, env=environment,
    )  # fmt: skip
    assert done.returncode == 7 and done.stdout == "0\n2\n0\n", done.stderr
    assert "big (enforce)" in done.stderr
    assert mmctl("breaker", "run", "--", "no-such-program").returncode == 2
    missing = mmctl("breaker", "watch", "hook:1", "--duration", "1s")
    assert missing.returncode == 4 and "no hook is in process 1" in missing.stderr


def test_the_hook_source_gives_segments_and_refusals(built: Path, control: layout.Control) -> None:
    import threading

    from mmctl.engine.records import Device, Event, Memory
    from mmctl.engine.sources.hook import source

    control.write("enforce", [rule("size_bytes > 32MiB")])
    app = App(built, control)
    app.do("malloc", MIB)
    stop, seen = threading.Event(), []
    records = source(str(app.process.pid), profiles.load().profile, stop)
    seen.append(next(records))
    app.do("malloc", 40 * MIB)
    for record in records:
        seen.append(record)
        if isinstance(record, Event):
            stop.set()
    assert isinstance(seen[0], Memory) and seen[0].size_bytes == MIB
    devices = [record for record in seen if isinstance(record, Device)]
    assert not devices or devices[-1].reserved_bytes == MIB
    (event,) = [record for record in seen if isinstance(record, Event)]
    assert event.what == "refuse_allocation" and event.evidence["size_bytes"] == 40 * MIB
    assert msgspec.json.encode(event)
    app.end()
