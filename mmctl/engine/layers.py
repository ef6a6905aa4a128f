"""Layers of TOML merged into one, typed and checked: every value with where it was set, every
problem at once."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import msgspec

from mmctl.engine import units
from mmctl.engine.errors import MmctlError, UsageError, suggestion

T = TypeVar("T", bound=msgspec.Struct)


class Origin(msgspec.Struct, frozen=True):
    """Where a value was set: a profile's name, a file and line, or an environment variable."""

    profile: str
    file: str | None = None
    line: int | None = None

    def __str__(self) -> str:
        return f"{self.file}:{self.line}" if self.line else (self.file or self.profile)


class Problem(msgspec.Struct, frozen=True):
    """One thing wrong with a profile, and where."""

    key: str
    message: str
    origin: Origin

    def __str__(self) -> str:
        return f"{self.origin}: {self.key}: {self.message}"


def read(path: Path) -> dict[str, Any]:
    """The tables of a TOML file; UsageError when it is none."""
    import tomli

    try:
        return tomli.loads(path.read_text("utf-8"))
    except (tomli.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} is not TOML: {error}") from None
    except OSError as error:
        raise MmctlError(f"cannot read profile {path}: {error.strerror}") from None


_HEADER = re.compile(r"\s*\[(\[?)\s*([A-Za-z0-9_.\-]+)\s*\]")
_KEY = re.compile(r"\s*([A-Za-z0-9_\-]+)\s*=")


def _lines(path: Path) -> dict[str, int]:
    """Dotted key → line number, by a light scan: enough to point an editor at the place."""
    found: dict[str, int] = {}
    table, counts = "", {"": 0}
    for number, line in enumerate(path.read_text("utf-8").splitlines(), 1):
        if header := _HEADER.match(line):
            table = header[2]
            if header[1]:
                index = counts.get(table, 0)
                counts[table] = index + 1
                table = f"{table}.{index}"
            found.setdefault(table, number)
        elif key := _KEY.match(line):
            found.setdefault(f"{table}.{key[1]}" if table else key[1], number)
    return found


def merge(written: dict[str, Any], origins: dict[str, Origin], path: Path) -> None:
    """Lay the TOML file ``path`` over ``written``, key by key."""
    lines = _lines(path)

    def origin(key: str) -> Origin:
        return Origin(path.stem, str(path), lines.get(key))

    origins[""] = origin("")
    for table, content in read(path).items():
        if table == "extends":
            continue
        origins[table] = origin(table)
        if not isinstance(content, dict):
            written[table] = content
            continue
        target = written.setdefault(table, {})
        if table == "breaker" and content.get("inherit_rules") is False:
            target["rules"] = []
        for key, value in content.items():
            if table == "breaker" and key == "rules" and isinstance(value, list):
                rules = target.setdefault("rules", [])
                for index, rule in enumerate(value):
                    _merge_rule(rules, origins, rule, index, origin)
            else:
                target[key] = value
                origins[f"{table}.{key}"] = origin(f"{table}.{key}")
                for index, entry in enumerate(value if isinstance(value, list) else ()):
                    if isinstance(entry, dict):
                        at = f"{table}.{key}.{index}"
                        origins |= {place: origin(place) for place in (at, *_under(at, entry))}


def _under(where: str, entry: dict[str, Any]) -> Iterator[str]:
    return (f"{where}.{key}" for key in entry)


def _merge_rule(
    rules: list[Any], origins: dict[str, Origin], rule: Any, index: int, origin: Any
) -> None:
    """A rule of a known name changes that rule key by key; another is added at the end."""
    name = rule.get("name") if isinstance(rule, dict) else None
    place = next(
        (i for i, old in enumerate(rules) if isinstance(old, dict) and old.get("name") == name),
        len(rules),
    )
    if place == len(rules):
        rules.append({})
    if not isinstance(rule, dict):
        rules[place] = rule
        origins[f"breaker.rules.{place}"] = origin(f"breaker.rules.{index}")
        return
    rules[place] = {**rules[place], **rule}
    for key in rule:
        origins[f"breaker.rules.{place}.{key}"] = origin(f"breaker.rules.{index}.{key}")
    origins.setdefault(f"breaker.rules.{place}", origin(f"breaker.rules.{index}"))


def apply_environment(written: dict[str, Any], origins: dict[str, Origin]) -> None:
    """Let ``MMCTL_<TABLE>_<KEY>`` replace single values of ``written``."""
    for variable, (table, key) in _variables(written).items():
        text = os.environ.get(variable)
        if text is None:
            continue
        old = written[table][key]
        value: Any = text
        if isinstance(old, list):
            value = [part.strip() for part in text.split(",") if part.strip()]
        elif isinstance(old, bool):
            value = {"true": True, "1": True, "false": False, "0": False}.get(text, text)
        elif isinstance(old, (int, float)):
            value = _number(text)
        written[table][key] = value
        origins[f"{table}.{key}"] = Origin(f"environment {variable}")


def _variables(written: dict[str, Any]) -> dict[str, tuple[str, str]]:
    """Every variable that can replace a value, and whose table and key it is."""
    return {
        f"MMCTL_{table}_{key}".upper(): (table, key)
        for table, content in written.items()
        if isinstance(content, dict)
        for key, value in content.items()
        if not (isinstance(value, list) and any(isinstance(one, dict) for one in value))
        and key != "rules"
    }


_OTHER_VARIABLES = ("MMCTL_PROFILE", "MMCTL_PLAIN", "MMCTL_AGENT")
"""What the rooms read beside a profile's values, and so do ``MMCTL_HOOK_…``."""
_NEAR_RATIO = 0.8


def unread_variables(written: dict[str, Any]) -> list[str]:
    """Variables that look like ours and set nothing: of a table, or nearly one that does.

    Other tools may own further ``MMCTL_`` names; those are theirs.
    """
    known = (*_variables(written), *_OTHER_VARIABLES)
    tables = tuple(f"MMCTL_{table}_".upper() for table in written)
    said = []
    for name in sorted(os.environ):
        if not name.startswith("MMCTL_") or name in known or name.startswith("MMCTL_HOOK_"):
            continue
        # The part that all share would make every name near.
        near = get_close_matches(name[6:], [one[6:] for one in known], 1, _NEAR_RATIO)
        if near or name.startswith(tables):
            hint = f"; did you mean 'MMCTL_{near[0]}'?" if near else ""
            said.append(f"{name} in the environment sets nothing{hint}")
    return said


def by_name(problem: Problem, written: dict[str, Any]) -> Problem:
    """``problem`` with the entry of a list of tables called by its name, as ``profile show`` does:
    its place in the list counts what is inherited too."""
    parts = problem.key.split(".")
    value: Any = written
    for place, part in enumerate(parts):
        if isinstance(value, list) and part.isdigit() and int(part) < len(value):
            value = value[int(part)]
            if isinstance(value, dict) and isinstance(value.get("name"), str):
                parts[place] = value["name"]
        else:
            value = value.get(part) if isinstance(value, dict) else None
    return msgspec.structs.replace(problem, key=".".join(parts))


def _number(text: str) -> int | float | str:
    try:
        return int(text)
    except ValueError:
        try:
            return float(text)
        except ValueError:
            return text


def typed(
    struct: type[T], written: dict[str, Any], origins: dict[str, Origin], here: Origin
) -> tuple[T | None, list[Problem]]:
    """``written`` as a ``struct``, or None and everything that does not fit."""
    problems: list[Problem] = []
    values = _build(struct, written, "", origins, here, problems)
    if problems:
        return None, [by_name(problem, written) for problem in problems]
    try:
        return msgspec.convert(values, struct), []
    except msgspec.ValidationError as error:
        found = re.search(r"at `\$\.?([^`]*)`", str(error))
        return None, [Problem(found[1] if found else "profile", str(error), here)]


def _build(
    struct: type, content: dict[str, Any], where: str, origins: dict[str, Origin],
    here: Origin, problems: list[Problem],
) -> dict[str, Any]:  # fmt: skip
    """Plain values for ``struct``; everything that does not fit becomes a problem."""
    fields = _fields(struct)
    values: dict[str, Any] = {}
    for key, value in content.items():
        path = f"{where}.{key}" if where else key
        origin = origins.get(path) or origins.get(where) or here
        if key not in fields:
            problems.append(Problem(path, f"unknown key{suggestion(key, fields)}", origin))
            continue
        try:
            values[key] = _value(fields[key][0], value, path, origins, origin, problems)
        except ValueError as error:
            problems.append(Problem(path, str(error), origin))
    for key, (_, required) in fields.items():
        if key not in content and required:
            path = f"{where}.{key}" if where else key
            problems.append(Problem(path, "missing", origins.get(where) or here))
    return values


@cache
def _fields(struct: type) -> dict[str, tuple[Any, bool]]:
    """Type and whether it is required, by a field's name in files."""
    hints = get_type_hints(struct, include_extras=True)
    return {
        field.encode_name: (hints[field.name], field.required)
        for field in msgspec.structs.fields(struct)
    }


def _value(
    hint: Any, value: Any, path: str, origins: dict[str, Origin], here: Origin,
    problems: list[Problem],
) -> Any:  # fmt: skip
    meta = None
    if get_origin(hint) is Annotated:
        hint, meta = get_args(hint)
    if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
        if not isinstance(value, dict):
            raise ValueError(f"must be a table, not {value!r}")
        return _build(hint, value, path, origins, here, problems)
    if get_origin(hint) is tuple:
        if not isinstance(value, list):
            raise ValueError(f"must be a list, not {value!r}")
        inner = get_args(hint)[0]
        return [
            _value(inner, item, f"{path}.{i}", origins, here, problems)
            for i, item in enumerate(value)
        ]
    if get_origin(hint) is Literal:
        known = get_args(hint)
        if value not in known:
            raise ValueError(
                f"must be one of {', '.join(known)}, not {value!r}{suggestion(str(value), known)}"
            )
        return value
    return _scalar(hint, meta, value)


def _scalar(hint: Any, meta: msgspec.Meta | None, value: Any) -> Any:
    unit = (meta.extra or {}).get("unit") if meta else None
    if unit and isinstance(value, str):
        value = units.parse(value, unit)
    elif unit in ("bytes", "seconds") and value not in (0, 0.0):
        example = "'16MiB'" if unit == "bytes" else "'100ms'"
        raise ValueError(f"needs a unit such as {example}, not {value!r}")
    if hint is int and isinstance(value, float) and value.is_integer():
        value = int(value)
    try:
        return msgspec.convert(value, Annotated[hint, meta] if meta else hint)
    except msgspec.ValidationError as error:
        raise ValueError(f"{value!r}: {str(error)[0].lower()}{str(error)[1:]}") from None
