"""Another profile or mode for a breaker that runs: events of the stream that the breaker obeys.

An event of either kind holds all that the breaker needs, so that a recording of a session in
which rules were changed decides again as it did.
"""

from __future__ import annotations

import os
import queue
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from mmctl.engine import folders, profiles
from mmctl.engine.errors import MmctlError, UsageError
from mmctl.engine.profiles import Loaded, Mode, Profile
from mmctl.engine.records import Event
from mmctl.engine.responses import names
from mmctl.engine.rules.rule import compile_rules

LOOK_S = 1.0


def mode_event(mode: Mode, ts_ns: int, node: str) -> Event:
    """The order to go on in ``mode``."""
    return Event(
        ts_ns=ts_ns, node=node, what="mode", mode=mode, message=f"switched to {mode} by hand",
        evidence={"by": os.getuid()},
    )  # fmt: skip


def reload_event(loaded: Loaded, before: Profile, mode: Mode, ts_ns: int, node: str) -> Event:
    """The order to go on with the rules and settings of ``loaded``, and what that changes."""
    difference = compare(before, loaded.profile)
    return Event(
        ts_ns=ts_ns, node=node, what="reload", mode=mode,
        message=f"profile '{loaded.name}': {said(difference)}",
        evidence={**policy(loaded.profile), "profile": loaded.name, **difference},
    )  # fmt: skip


def refused_event(error: MmctlError, mode: Mode, ts_ns: int, node: str) -> Event:
    """A profile that cannot be used: the breaker goes on with the one that it has."""
    return Event(
        ts_ns=ts_ns, node=node, what="reload", mode=mode, state="refused",
        message=f"the old profile stays: {error}", evidence={"refused": str(error)},
    )  # fmt: skip


def policy(profile: Profile) -> dict[str, Any]:
    """Everything in ``profile`` that decisions rest on, as an event's evidence holds it."""
    table = msgspec.to_builtins(profile.breaker)
    rules = table.pop("rules")
    return {"rules": rules, "settings": table, "order": list(profile.responses.order)}


def check(profile: Profile) -> None:
    """UsageError for rules that cannot be read and for responses that nobody knows."""
    compile_rules(profile.breaker.rules)
    if said := names.problems(profile):
        raise UsageError("; ".join(said))


def with_policy(profile: Profile, evidence: dict[str, Any]) -> Profile:
    """``profile`` with the rules and settings of an event's evidence.

    A setting that an older recording does not have stays as it is in ``profile``.

    Raises MmctlError for evidence that holds none or that cannot be read: recordings are
    strangers' files.
    """
    try:
        known = policy(profile)["settings"]
        table = {**known, **evidence["settings"], "rules": evidence["rules"]}
        breaker = msgspec.convert(table, profiles.Breaker)
        order = msgspec.convert(evidence["order"], profiles.Names)
    except (KeyError, TypeError, msgspec.ValidationError) as error:
        raise MmctlError(f"the recorded rules cannot be read: {error}") from None
    compile_rules(breaker.rules)
    responses = msgspec.structs.replace(profile.responses, order=order)
    return msgspec.structs.replace(profile, breaker=breaker, responses=responses)


def compare(before: Profile, after: Profile) -> dict[str, list[str]]:
    """Which rules are kept, changed, added and removed, and which settings of [breaker] differ."""
    old = {rule.name: rule for rule in before.breaker.rules}
    new = {rule.name: rule for rule in after.breaker.rules}
    old_keys, new_keys = policy(before)["settings"], policy(after)["settings"]
    return {
        "kept": [name for name in new if old.get(name) == new[name]],
        "changed": [name for name in new if name in old and old[name] != new[name]],
        "added": [name for name in new if name not in old],
        "removed": [name for name in old if name not in new],
        "keys": [key for key in new_keys if old_keys.get(key) != new_keys[key]],
    }


def said(difference: dict[str, list[str]]) -> str:
    """What ``compare`` found, in one line."""
    parts = [
        f"{len(names)} {what} ({', '.join(names)})"
        for what in ("changed", "added", "removed")
        if (names := difference[what])
    ]
    if keys := difference["keys"]:
        parts.append(f"settings {', '.join(keys)}")
    return "; ".join([*parts, f"{len(difference['kept'])} rules kept"])


class Changes:
    """Another profile or mode for the breaker of another thread, as events of its stream.

    The profile is read again when one of its files changes or when asked to (a signal);
    ``name`` None follows the selection (``mmctl profile use``) too. ``mode`` None lets the
    profile's own mode hold.
    """

    def __init__(self, loaded: Loaded, name: str | None = None, mode: Mode | None = None) -> None:
        self.loaded, self.name, self.mode = loaded, name, mode
        self._stamps = self._now()
        self._looked = time.monotonic()
        self._asked = False
        self._waiting: queue.SimpleQueue[tuple[str, str]] = queue.SimpleQueue()

    def read_again(self) -> None:
        """Have the profile read again at the next record; safe inside a signal handler."""
        self._asked = True

    def use(self, name: str) -> None:
        """Go on with another profile, given by name or path."""
        self._waiting.put(("profile", name))

    def switch(self, mode: Mode) -> None:
        """Go on in another mode; it holds over later changes of the profile."""
        self._waiting.put(("mode", mode))

    def events(self, before: Profile, mode: Mode, ts_ns: int, node: str) -> Iterator[Event]:
        """What was changed since the last call, for a breaker with this profile and mode.

        A profile that is not valid is an event too: it is refused, and the old one stays.
        """
        while not self._waiting.empty():
            what, value = self._waiting.get()
            if what == "mode":
                self.mode = mode = value  # type: ignore[assignment]
                yield mode_event(mode, ts_ns, node)
            else:
                known, self.name, self._asked = self.name, value, True
                event = self._reread(before, mode, ts_ns, node)
                if event is not None and event.state == "refused":
                    self.name = known
                if event is not None:
                    yield event
        if (event := self._reread(before, mode, ts_ns, node)) is not None:
            yield event

    def _reread(self, before: Profile, mode: Mode, ts_ns: int, node: str) -> Event | None:
        try:
            if not self.changed():
                return None
            mode = self.mode or self.loaded.profile.breaker.mode
            return reload_event(self.loaded, before, mode, ts_ns, node)
        except MmctlError as error:
            return refused_event(error, mode, ts_ns, node)

    def changed(self) -> bool:
        """Read the profile again where there is reason to, looking at most once in ``LOOK_S``.

        Raises MmctlError when it is not valid; ``loaded`` is then the old one.
        """
        asked = self._asked
        if not asked:
            if time.monotonic() - self._looked < LOOK_S:
                return False
            self._looked = time.monotonic()
            if self._now() == self._stamps:
                return False
        self._asked = False
        self._stamps = self._now()
        loaded = profiles.load(self.name)
        check(loaded.profile)
        if loaded.profile == self.loaded.profile and not asked:
            return False
        self.loaded = loaded
        self._stamps = self._now()
        return True

    def _now(self) -> dict[str, tuple[int, int]]:
        """Time and size of every file that the profile came from."""
        files = {origin.file for origin in self.loaded.origins.values() if origin.file}
        if self.name is None:
            files.add(str(folders.config() / "active"))
        found = {}
        for file in files:
            try:
                status = Path(file).stat()
            except OSError:
                continue
            found[file] = (status.st_mtime_ns, status.st_size)
        return found
