"""``mmctl profile``: what is set, where, and what is wrong with it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mmctl.cli import completion
from mmctl.cli.app import common, may_write, note, output, to_write
from mmctl.cli.main import Exit
from mmctl.cli.profile import checks
from mmctl.cli.render import emit, to_json, to_table
from mmctl.engine import atomic, folders, profiles
from mmctl.engine.errors import UsageError
from mmctl.engine.records import SCHEMA

Name = Annotated[
    str,
    typer.Argument(
        metavar="[NAME|PATH]",
        autocompletion=completion.profiles,
        help="A profile; the one in force.",
    ),
]


def _name(given: str) -> str:
    return given or common().profile or profiles.selected()[0]


def list_() -> None:
    """Every profile, where it is and which one is in force.

    \b
    Examples:
      mmctl profile
      mmctl profile list -o json
    """
    chosen, by = profiles.selected()
    rows = [
        {
            "name": name,
            "in_force": name == chosen,
            "in_force_by": by if name == chosen else None,
            "about": profiles.about(path),
            "file": str(path),
        }
        for name, path in profiles.available().items()
    ]
    brief = [
        {"name": row["name"], "in force": row["in_force"], "file": Path(str(row["file"])).name,
         "about": row["about"]}
        for row in rows
    ]  # fmt: skip
    table = f"{to_table(brief)}\n\n'{chosen}' is in force: {by}"
    emit({"schema": SCHEMA, "profiles": rows}, rows, output(), table=table)


def show(name: Name = "") -> None:
    """All values of a profile, each with the place that set it.

    What each of them means: man mmctl.toml.

    \b
    Examples:
      mmctl profile show
      mmctl profile show paper -o json
    """
    loaded = profiles.load(_name(name))
    rows = [
        {"key": key, "value": value if isinstance(value, (str, int, float)) else to_json(value),
         "set_by": str(loaded.origins.get(_origin_key(loaded, key), loaded.origins[""]))}
        for key, value in profiles.leaves(loaded.written)
    ]  # fmt: skip
    document = {
        "schema": SCHEMA, "name": loaded.name, "profile": loaded.written, "values": rows,
    }  # fmt: skip
    # The folder of shipped profiles is the same in every line.
    brief = [
        {"key": row["key"], "value": row["value"],
         "set_by": str(row["set_by"]).removeprefix(f"{profiles.shipped_dir()}/")}
        for row in rows
    ]  # fmt: skip
    emit(document, rows, output(), table=to_table(brief, ["key", "set_by", "value"]))


def _origin_key(loaded: profiles.Loaded, key: str) -> str:
    """Rules are shown by name and remembered by place."""
    table, _, rest = key.partition(".rules.")
    if not rest:
        return key
    name, _, field = rest.rpartition(".")
    names = [rule.get("name") for rule in loaded.written[table]["rules"]]
    return f"{table}.rules.{names.index(name)}.{field}"


def use(
    name: Annotated[
        str,
        typer.Argument(
            metavar="[NAME|PATH]", autocompletion=completion.profiles, help="A profile."
        ),
    ] = "",
    none: Annotated[
        bool, typer.Option("--none", help="None for this user: ./mmctl.toml or default holds.")
    ] = False,
) -> None:
    """Put a profile in force for this user, or none.

    MMCTL_PROFILE goes before it, ./mmctl.toml of a project behind it: --none lets that hold
    again, and default elsewhere.

    \b
    Examples:
      mmctl profile use paper
      mmctl profile use --none
    """
    if none == bool(name):
        known = ", ".join(profiles.available())
        raise UsageError(f"use which profile? One of {known}, a path, or --none")
    folder = folders.config()
    if none:
        (folder / "active").unlink(missing_ok=True)
    else:
        profiles.load(name)
        kept = name if name in profiles.available() else str(profiles.find(name).resolve())
        folder.mkdir(parents=True, exist_ok=True)
        atomic.write(folder / "active", kept + "\n")
    now, by = profiles.selected()
    if none or now == kept:
        note(f"profile '{now}' is in force: {by}")
    else:
        note(f"profile '{kept}' is kept for this user, but '{now}' is in force: {by}")


def new(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="Its name: letters, digits, - and _.")
    ],
    extends: Annotated[
        str,
        typer.Option(
            metavar="NAME|PATH",
            autocompletion=completion.profiles,
            help="The profile to start from.",
        ),
    ] = "default",
    out: Annotated[Path | None, to_write("File to write instead.")] = None,
) -> None:
    """Start a profile that extends another.

    \b
    Examples:
      mmctl profile new night --extends paper
      mmctl profile new night --out ./mmctl.toml
    """
    profiles.find(extends)
    path = out or folders.config() / "profiles" / f"{name}.toml"
    if not name.replace("-", "").replace("_", "").isalnum():
        raise UsageError(f"'{name}' is no profile name: use letters, digits, - and _")
    path.parent.mkdir(parents=True, exist_ok=True)
    may_write(path)
    atomic.write(
        path,
        f'# {name}: says what differs from {extends}\nextends = "{extends}"\n\n'
        "# mmctl profile show lists every key, mmctl profile validate checks this file.\n"
        '[breaker]\nmode = "observe"\n',
    )
    note(f"wrote {path}")


def validate(name: Name = "") -> int:
    """All problems of a profile at once; exit 3 when there are any.

    \b
    Examples:
      mmctl profile validate
      mmctl profile validate ./mmctl.toml -o json
    """
    wanted = _name(name)
    problems = checks.problems(wanted)
    checks.notes(profiles.written(wanted)[0])
    rows = [
        {
            "key": problem.key,
            "message": problem.message,
            "file": problem.origin.file or problem.origin.profile,
            "line": problem.origin.line,
        }
        for problem in problems
    ]
    text = "\n".join(str(problem) for problem in problems) or f"profile '{wanted}' is valid"
    emit({"schema": SCHEMA, "name": wanted, "problems": rows}, rows, output(), table=text)
    return Exit.FINDING if problems else Exit.DONE


def diff(
    a: Annotated[
        str,
        typer.Argument(
            metavar="A", autocompletion=completion.profiles, help="A profile, by name or path."
        ),
    ],
    b: Annotated[
        str, typer.Argument(metavar="B", autocompletion=completion.profiles, help="The other.")
    ],
) -> None:
    """What two profiles set differently.

    \b
    Examples:
      mmctl profile diff default paper
      mmctl profile diff default paper -o csv
    """
    left = dict(profiles.leaves(profiles.load(a).written))
    right = dict(profiles.leaves(profiles.load(b).written))
    rows = [
        {"key": key, "a": left.get(key), "b": right.get(key)}
        for key in dict.fromkeys([*left, *right])
        if left.get(key) != right.get(key)
    ]
    text = None if rows else f"'{a}' and '{b}' set the same values"
    emit({"schema": SCHEMA, "a": a, "b": b, "differences": rows}, rows, output(), table=text)
