"""Manual pages of what is written and read: records, profiles and the language of rules.

Made from the code and the default profile by ``python tests/manual.py``, as the commands' are.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import msgspec

from mmctl.engine import profiles, records
from mmctl.engine.rules import language
from mmctl.engine.rules.signals import KINDS, SIGNALS
from mmctl.engine.rules.windows import COVERED, WHOLE

PAGES = ("mmctl-records(5)", "mmctl.toml(5)", "mmctl-rules(5)")
PARTS = (records.Process, records.Latencies, records.Fits, records.Heat)
WORDS = {
    "int": "whole number", "float": "number", "str": "text", "bool": "true or false",
    "Any": "anything", "object": "anything",
}  # fmt: skip
UNITS = (
    ("_ns", "nanoseconds; ts_ns since 1970-01-01 UTC"), ("_s, _us, _ms", "seconds and parts"),
    ("_bytes", "bytes"), ("_ratio, _share", "0 to 1"), ("_c", "degrees Celsius"), ("_w", "watts"),
    ("_j", "joules"), ("_hz", "hertz"), ("_per_s", "per second"), ("_tokens", "tokens"),
)  # fmt: skip


def pages(header: str) -> Iterator[tuple[str, str]]:
    """(file name, page) of each; ``header`` has the name and title to be filled in."""
    for name, about, body in (
        ("mmctl-records", "what mmctl writes and reads, one JSON object a line", _records()),
        ("mmctl.toml", "the values that mmctl works by, and their files", _profile()),
        ("mmctl-rules", "expressions over signals, by which the breaker trips", _rules()),
    ):
        also = ", ".join(bold(page) for page in ("mmctl(1)", *PAGES) if page != f"{name}(5)")
        yield (
            f"man5/{name}.5",
            header.format(name=name.upper()) + f".nh\n.SH NAME\n{text(name)} \\- {text(about)}\n"
            f"{body}.SH SEE ALSO\n{also}\n",
        )


def text(words: str) -> str:
    """``words`` for roff: literals in bold, nothing taken for a command."""
    escaped = words.replace("\\", r"\e").replace("-", r"\-")
    escaped = re.sub(r"``(.+?)``", r"\\fB\1\\fP", escaped)
    return re.sub(r"^([.'])", r"\\&\1", escaped, flags=re.MULTILINE)


def bold(name: str) -> str:
    """A page's name, as the pages of commands set it."""
    stem, section = name.rstrip(")").split("(")
    return f"\\fB{text(stem)}\\fP({section})"


def item(term: str, about: str, more: str = "") -> str:
    """A term with what it means below it; ``more`` stands beside the term, not in bold."""
    return f".TP\n\\fB{text(term)}\\fP{'  ' + text(more) if more else ''}\n{text(about)}\n"


def paragraphs(doc: str) -> str:
    """A docstring as paragraphs."""
    parts = dedent(" " * 4 + doc).strip().split("\n\n")
    return "\n".join(".PP\n" + text(" ".join(part.split())) for part in parts) + "\n"


def shape(annotation: Any) -> str:
    """A type as a reader of JSON would say it."""
    origin, inside = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return shape(inside[0])
    if origin in (UnionType, Union):
        kinds = [shape(one) for one in inside if one is not type(None)]
        return " or ".join(kinds) + (", or null" if type(None) in inside else "")
    if origin is Literal:
        return " | ".join(inside)
    if origin is tuple:
        if inside[-1] is Ellipsis:
            return f"list of {shape(inside[0])}"
        return "[" + ", ".join(map(shape, inside)) + "]"
    if origin is dict:
        return f"object of {shape(inside[1])}"
    name = getattr(annotation, "__name__", str(annotation))
    return WORDS.get(name, f"{name}, see below")


def _fields(struct: type, without: tuple[str, ...] = ()) -> str:
    """A line a field: name and shape."""
    hints = get_type_hints(struct)
    shown = [
        (field.encode_name, shape(hints[field.name]))
        for field in msgspec.structs.fields(struct)
        if field.name not in without
    ]
    width = max(len(name) for name, _ in shown) + 2
    lines = (f"\\fB{text(name)}\\fP{' ' * (width - len(name))}{text(told)}" for name, told in shown)
    return ".PP\n.nf\n" + "\n".join(lines) + "\n.fi\n"


def _records() -> str:
    body = ".SH DESCRIPTION\n" + paragraphs(records.__doc__ or "")
    body += paragraphs(
        "A recording is such lines, the first of type ``recording``, often compressed "
        "(``.ndjson.zst``). Every command that takes a source takes one, or ``-`` for standard "
        "input; ``-o ndjson`` writes one. Unknown fields and lines of unknown types are passed "
        "over, so that a recording of another version opens."
    )
    body += ".SH UNITS\nThe end of a field's name is its unit.\n"
    body += "".join(item(end, unit) for end, unit in UNITS)
    body += ".SH RECORDS\nEvery record has ``type``, ``ts_ns`` and ``node``.\n".replace("``", "")
    for struct in get_args(records.AnyRecord):
        tag = struct.__struct_config__.tag
        body += f".SS {tag}\n{paragraphs(struct.__doc__ or '')}"
        body += _fields(struct, () if struct is records.Recording else ("ts_ns", "node"))
    body += ".SH PARTS\nObjects inside records.\n"
    for struct in PARTS:
        body += f".SS {struct.__name__}\n{paragraphs(struct.__doc__ or '')}{_fields(struct)}"
    return body


def _profile() -> str:
    body = ".SH DESCRIPTION\n" + paragraphs(
        "A profile is a TOML file. One named by ``--profile``, else ``MMCTL_PROFILE``, else chosen "
        "by ``mmctl profile use``, else ``./mmctl.toml`` is in force, else ``default``. It extends "
        "``default``, or what its first key ``extends`` names, and holds only what differs; a rule "
        "of a known name changes that rule key by key, and ``MMCTL_TABLE_KEY`` in the environment "
        "changes a single value. ``mmctl profile show`` prints every value and where it comes "
        "from, ``mmctl profile validate`` every problem.\n\n"
        "Sizes carry their unit (``'16MiB'``), as do times (``'100ms'``) and rates; a ratio is a "
        "number from 0 to 1 or a percentage. Below is every key with its value in ``default``."
    )
    path = profiles.shipped_dir() / "default.toml"
    comments = _comments(path)
    written = profiles.load("default").written
    for table in msgspec.structs.fields(profiles.Profile):
        body += f".SH [{table.encode_name}]\n{text(_sentence(table.type))}\n"
        for field in msgspec.structs.fields(table.type):
            key, value = field.encode_name, written[table.encode_name][field.encode_name]
            if isinstance(value, list) and value and isinstance(value[0], dict):
                body += _entries(f"{table.encode_name}.{key}", field.type)
            else:
                body += item(key, comments[f"{table.encode_name}.{key}"], f"= {_toml(value)}")
    return body


def _sentence(struct: type) -> str:
    return " ".join((struct.__doc__ or "").split())


def _entries(name: str, kind: Any) -> str:
    struct = get_args(kind)[0]
    body = f".SS [[{name}]]\n{text(_sentence(struct))}\n"
    for field in msgspec.structs.fields(struct):
        default = "" if field.required else f"= {_toml(field.default)}"
        if field.name.endswith("_s"):
            default = f"= '{field.default:g}s'"
        body += item(field.encode_name, _ENTRY[field.encode_name], default)
    return body


_ENTRY = {
    "name": "what it is called on screen and in the log",
    "when": "the expression by which it holds: see ``mmctl-rules(5)``",
    "clear": "the expression by which it ends; else it ends where ``when`` no longer holds",
    "hold": "how long ``when`` must hold without a break",
    "min_samples": "in so many samples in a row",
    "max_age": "an input older than this is unknown, and the rule with it",
    "respond": "responses in their order, in place of those of ``[responses]``",
    "mode": "observe: it never acts, whatever the breaker's mode",
    "quiet_in_recovery": "it sleeps during a recovery and ``settle`` after it",
    "match": "regular expression that is found in the model's name",
    "config": "fields of a ``config.json`` by which images become tokens",
}


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return f'"{value}"'
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(_toml, value)) + "]"
    return str(value)


def _comments(path: Path) -> dict[str, str]:
    """What the file says of each ``table.key``: beside it, going on where it ends in ``...``,
    else above it. Raises KeyError, by whoever asks, for a key of which it says nothing."""
    found: dict[str, str] = {}
    table, above = "", ""
    for line in path.read_text("utf-8").splitlines():
        if header := re.match(r"\[+([\w.]+)\]+", line):
            table, above = header[1], ""
        elif line.startswith("#"):
            above = f"{above} {line[1:].strip()}".strip()
        elif key := re.match(r"(\w+)\s*=", line):
            marks = [m for m in re.finditer(r"\s# ", line) if line[: m.start()].count('"') % 2 == 0]
            about = line[marks[0].end() :].strip() if marks else above
            if about:
                found[f"{table}.{key[1]}"] = about
        elif not line.strip():
            above = ""
    return found


def _rules() -> str:
    example = re.search(r"(?:^    .*\n)+", language.__doc__ or "", re.MULTILINE)
    assert example is not None
    body = ".SH DESCRIPTION\n" + paragraphs(
        "An expression compares signals with each other and with quantities (``16MiB``, ``800ms``, "
        "``85%``, ``256KiB/s``); comparisons are joined by ``and``, ``or`` and ``not``, numbers by "
        "``+ - * /``. It is read, never executed. What is compared must be of one unit: a signal's "
        "is the end of its name, and a number without a unit goes with any."
    )
    body += ".PP\n.nf\n" + text(dedent(example[0])) + ".fi\n"
    whole = ", ".join(f"``{name}``" for name in language.WINDOWS if name in WHOLE)
    body += paragraphs(
        "A window is a time or a number of samples, and ends before now where a third argument "
        f"says so. {whole} of a time are unknown until {COVERED:.0%} of it have been seen."
    )
    body += paragraphs(
        "Rules stand in a profile as ``[[breaker.rules]]``: see ``mmctl.toml(5)``. A rule whose "
        "inputs are absent or too old is unknown, and never trips. ``mmctl breaker rules`` shows "
        "each rule as it stands with the values of its inputs, ``mmctl breaker replay`` what it "
        "would have done in a recording."
    )
    body += ".SH FUNCTIONS\n"
    body += "".join(item(f"{name}(x, WINDOW)", _WINDOWS[name]) for name in language.WINDOWS)
    body += item("time_to(level, x, WINDOW)", "seconds until x reaches level at its slope")
    body += "".join(item(_CALLS[name][0], _CALLS[name][1]) for name in language.FUNCTIONS)
    body += ".SH SIGNALS\n" + paragraphs(
        "A signal is a field of a record under its own name, or ``record.field`` where two records "
        "share it: see ``mmctl-records(5)``."
    )
    for kind, about in KINDS.items():
        signals = [signal for signal in SIGNALS.values() if signal.kind == kind]
        own = [signal for signal in signals if signal.about != about.about]
        body += f".SS {kind}: {text(about.about)}\n"
        body += "".join(item(signal.name, signal.about) for signal in own)
        plain = {s.name.removeprefix(f"{kind}."): s.name for s in reversed(signals) if s not in own}
        body += f".PP\n{text(', '.join(reversed(plain.values())))}\n"
    return body


_WINDOWS = {
    "mean": "arithmetic mean",
    "std": "deviation of the population",
    "median": "median",
    "mad": "median absolute deviation, scaled to the deviation of a normal series",
    "min": "smallest value",
    "max": "largest value",
    "p50": "median",
    "p95": "95th percentile, linear between neighbours",
    "p99": "99th percentile",
    "rate": "increase of a counter per second; one that fell was restarted from 0",
    "slope": "change per second, by least squares",
    "count": "how many samples, or how many of a comparison that was true",
    "sum": "sum",
    "first": "oldest value",
    "delta": "newest value less the oldest",
}
_CALLS = {
    "log": ("log(x)", "natural logarithm; unknown of what is not positive"),
    "abs": ("abs(x)", "absolute value"),
    "sqrt": ("sqrt(x)", "square root; unknown of what is negative"),
    "at_least": ("at_least(x, y)", "the larger"),
    "at_most": ("at_most(x, y)", "the smaller"),
    "known": ("known(x)", "whether x has a value: the only function that is never unknown"),
}
