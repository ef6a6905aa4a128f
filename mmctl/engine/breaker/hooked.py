"""A program under the allocation hook: its environment, its rules, its inputs."""

from __future__ import annotations

import os
import shutil
import subprocess
import threading
from collections.abc import Iterable, Sequence
from contextlib import suppress

from mmctl.engine.breaker.hook_rule import hook_rules
from mmctl.engine.breaker.reload import LOOK_S, Changes
from mmctl.engine.errors import MmctlError, UsageError
from mmctl.engine.profiles import Loaded, Mode
from mmctl.engine.records import AnyRecord
from mmctl.engine.rules.signals import SIGNALS, getter
from mmctl.native import layout, library


class Hooked:
    """A child process with the hook in front of its CUDA calls.

    Rules follow the profile's file: they are read again when it changes, and a profile that has
    become invalid leaves those in force that were.
    """

    def __init__(self, command: Sequence[str], loaded: Loaded, mode: Mode) -> None:
        if shutil.which(command[0]) is None:
            raise UsageError(f"no program '{command[0]}'")
        self.loaded, self.mode = loaded, mode
        hook = library("hook")
        folder = layout.folder()
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.control = layout.Control(folder / f"control-{os.getpid()}")
        self.rules = hook_rules(loaded.profile, mode)
        self.control.write(mode, self.rules)
        preload = os.environ.get("LD_PRELOAD", "")
        environment = {
            **os.environ,
            # Last of the preloaded ones: whatever else is in front stays in front.
            "LD_PRELOAD": f"{preload}:{hook}" if preload else str(hook),
            "MMCTL_HOOK_CONTROL": str(self.control.path),
            "MMCTL_HOOK_FOLDER": str(folder),
        }
        try:
            self.process = subprocess.Popen(list(command), env=environment)
        except OSError as error:
            self.control.close()
            raise MmctlError(f"cannot start {command[0]}: {error.strerror}") from None
        self._ended = threading.Event()
        threading.Thread(target=self._follow_profile, daemon=True).start()

    def feed(self, records: Iterable[AnyRecord]) -> None:
        """Write every figure that the hook can use into its inputs, until the child ends."""
        readers = [
            (signal, getter(signal))
            for name in layout.SIGNALS[2:]
            if (signal := SIGNALS.get(name)) is not None
        ]
        kinds = {"pool": "pool", "serving": "serving", "device": "device"}
        for record in records:
            if self._ended.is_set():
                return
            kind = kinds.get(type(record).__name__.lower())
            for signal, read in readers:
                if signal.kind == kind and isinstance(value := read(record), (int, float)):
                    self.control.give(signal.name, float(value), record.ts_ns)  # type: ignore[union-attr]
            if kind == "serving":
                for name in ("vision_tokens", "text_tokens"):
                    value = getattr(record, name)
                    if value is not None:
                        self.control.give(name, float(value), record.ts_ns)  # type: ignore[union-attr]

    def wait(self) -> int:
        """The child's exit code as a shell would give it."""
        code = self.process.wait()
        return code if code >= 0 else 128 - code

    def end(self) -> None:
        """Stop following; the child must have ended."""
        self._ended.set()
        if self.process.poll() is None:
            self.process.terminate()
            self.process.wait()
        self.control.close()

    def _follow_profile(self) -> None:
        changes = Changes(self.loaded, self.loaded.name, self.mode)
        while not self._ended.wait(LOOK_S):
            with suppress(MmctlError):  # a profile that is not valid leaves the rules as they are
                if changes.changed():
                    rules = hook_rules(changes.loaded.profile, self.mode)
                    self.control.write(self.mode, rules)
                    self.rules = rules
