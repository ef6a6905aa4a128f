"""Typer made lazy: groups and commands are imported when they are called.

Every command takes the common options, before or after its own; ``common()`` gives them to
the function that runs.
"""

from __future__ import annotations

import os
import sys
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, NamedTuple

import typer
from typer._click.shell_completion import CompletionItem
from typer.core import TyperCommand, TyperGroup, TyperOption

from mmctl.cli import completion
from mmctl.cli.commands import EXAMPLES, TREE, Branch, Leaf
from mmctl.engine.errors import MmctlError, UsageError, suggestion

Output = Literal["table", "json", "ndjson", "csv"]
OUTPUTS = ("table", "json", "ndjson", "csv")


class Common(NamedTuple):
    """The options that every command takes."""

    profile: str | None = None
    output: str | None = None
    color: bool = True
    quiet: bool = False
    debug: bool = False


_given: dict[str, Any] = {}


def common() -> Common:
    """The common options as given on this command line."""
    color = "no_color" not in _given and not os.environ.get("NO_COLOR")
    return Common(
        profile=_given.get("profile"),
        output=_given.get("output"),
        color=color and os.environ.get("TERM") != "dumb",
        quiet="quiet" in _given,
        debug="debug" in _given,
    )


def output(*also: str) -> str:
    """The format asked for, ``table`` by default; UsageError for one not offered here."""
    wanted = common().output or "table"
    known = (*OUTPUTS, *also)
    if wanted not in known:
        raise UsageError(
            f"unknown format '{wanted}': one of {', '.join(known)}{suggestion(wanted, known)}"
        )
    return wanted


def quantity(option: str, text: str, unit: str) -> float:
    """A quantity as typed behind ``option``, in ``unit``; UsageError when it is none."""
    from mmctl.engine import units

    try:
        return units.parse(text, unit)
    except ValueError as error:
        raise UsageError(f"{option}: {error}") from None


def seconds(option: str, text: str, *, zero: bool = False) -> float:
    """A time as typed behind ``option``; UsageError when it is none, or not above nothing."""
    given = quantity(option, text, "seconds")
    if given < 0 or (given == 0 and not zero):
        least = "must not be negative" if zero else "must be more than nothing"
        raise UsageError(f"{option} {least}: {text}")
    return given


def web_address(option: str, text: str) -> str:
    """A URL as typed behind ``option``, without its last slash; UsageError for what is none."""
    scheme, mark, rest = text.partition("://")
    if scheme not in ("http", "https") or not mark or not rest.strip("/"):
        known = (
            "http://" + (rest or text) if "." in text or ":" in text else "http://127.0.0.1:8000"
        )
        raise UsageError(f"{option}: '{text}' is no URL such as {known}")
    return text.rstrip("/")


def host_port(text: str) -> tuple[str, int]:
    """An address as typed; UsageError for what is none."""
    host, colon, port = text.rpartition(":")
    if not colon or not port.isdigit() or int(port) > 65535:
        raise UsageError(f"'{text}' is no address such as 127.0.0.1:9477")
    return host.strip("[]") or "127.0.0.1", int(port)


def to_read(help: str = "URIs or files; - is stdin.") -> Any:
    """Arguments that name sources; the schemes are completed."""
    return typer.Argument(metavar="[SOURCE]...", help=help, autocompletion=completion.sources)


def to_write(help: str, *names: str, metavar: str = "FILE") -> Any:
    """An option that names a file (or FOLDER) to write; see ``may_write``."""
    return typer.Option(
        *names, metavar=metavar, help=help, writable=True, readable=False,
        dir_okay=metavar == "FOLDER",
    )  # fmt: skip


def may_write(path: Path) -> None:
    """MmctlError for a path that cannot be written, or where something is, without --force.

    Said before the work begins. Pipes, devices and ``-`` (standard output) are always written.
    """
    if str(path) == "-" or (path.exists() and not path.is_file() and not path.is_dir()):
        return
    if not path.parent.is_dir():
        raise MmctlError(f"cannot write {path}: there is no folder {path.parent}")
    if "force" in _given or not path.exists() or str(path).startswith("/dev/"):
        return
    if any(path.iterdir()) if path.is_dir() else path.stat().st_size:
        raise MmctlError(f"{path} is there already: name another, or replace it by --force")


def note(message: str) -> None:
    """A message to the person, on standard error; silent with -q."""
    if not common().quiet:
        print(message, file=sys.stderr)


def _remember(_: Any, parameter: Any, value: Any) -> None:
    if value not in (None, False):
        _given[parameter.name] = value


def _common_option(*names: str, **more: Any) -> TyperOption:
    return TyperOption(param_decls=list(names), expose_value=False, callback=_remember, **more)


def _common_options() -> list[TyperOption]:
    option = _common_option
    return [
        option(
            "--profile",
            metavar="NAME|PATH",
            help="Profile for this call.",
            autocompletion=completion.profiles,
        ),
        option(
            "-o",
            "--output",
            metavar="FORMAT",
            help="table, json, ndjson or csv; some commands have others.",
            autocompletion=completion.outputs,
        ),
        option("--no-color", is_flag=True, default=False, help="No colour."),
        option("-q", "--quiet", is_flag=True, default=False, help="No messages."),
        option("--debug", is_flag=True, default=False, help="Tracebacks for errors."),
    ]


HELP_NAMES = {"help_option_names": ["-h", "--help"]}


class PipeClosed(Exception):
    """Whoever read our output has gone; typer would end with 1 for the operating system's own."""


class Command(TyperCommand):
    """A command with the common options after its own."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command, once no file would be written over unasked."""
        for name in self.written:
            path = ctx.params.get(name)
            # A recording that rotates moves what is there out of its way.
            if path is not None and not ctx.params.get("rotate"):
                may_write(Path(path))
        try:
            return super().invoke(ctx)
        except BrokenPipeError:
            raise PipeClosed from None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.written = [p.name for p in self.params if getattr(p.type, "writable", False)]
        force = [_common_option("--force", is_flag=True, default=False,
                                help="Replace a file that is there.")]  # fmt: skip
        self.params = [*self.params, *(force if self.written else []), *_common_options()]
        self.context_settings = {**HELP_NAMES, **self.context_settings}


class Group(TyperGroup):
    """A group that reads its commands from the tree and imports one when it is called."""

    def __init__(self, name: str, entries: dict[str, Any], default: str | None, help: str) -> None:
        super().__init__(name=name, help=help, rich_markup_mode=None)
        self.entries, self.default_command = entries, default
        self.params = [*_common_options()]
        self.context_settings = dict(HELP_NAMES)

    def list_commands(self, ctx: Any) -> list[str]:
        """Names in the tree's order."""
        return list(self.entries)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """The command or group, imported now; UsageError with a suggestion for no such name."""
        entry = self.entries.get(cmd_name)
        if entry is None:
            raise UsageError(
                f"no command '{cmd_name}' in '{ctx.command_path}'"
                f"{suggestion(cmd_name, self.entries) or f'; see {ctx.command_path} --help'}"
            )
        if isinstance(entry, Branch):
            text = entry.help + (f"\n\n\b\nExamples:\n{entry.examples}" if entry.examples else "")
            return Group(cmd_name, entry.commands, entry.default, text)
        return load(cmd_name, entry)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Put the default command before arguments that name no command of this group."""
        word = _first_word(args)
        if ctx.resilient_parsing and word is None:
            pass  # a line being completed: any command may still follow
        elif self.default_command is not None:
            if word not in self.entries and not {"-h", "--help"} & set(args[:1]):
                self._check_word(ctx, word)
                args = [self.default_command, *args]
        elif not args:
            args = ["--help"]
        rest: list[str] = super().parse_args(ctx, args)
        return rest

    def shell_complete(self, ctx: Any, incomplete: str) -> list[Any]:
        """Commands that begin so, without importing one; else the default command's first
        argument; or this group's options."""
        if incomplete.startswith("-"):
            options: list[Any] = super().shell_complete(ctx, incomplete)
            return options
        found: list[Any] = [
            CompletionItem(name, help=entry.help)
            for name, entry in self.entries.items()
            if name.startswith(incomplete)
        ]
        if not found and self.default_command is not None:
            for parameter in self.get_command(ctx, self.default_command).params:
                if parameter.param_type_name == "argument":
                    return list(parameter.shell_complete(ctx, incomplete))
        return found

    def _check_word(self, ctx: Any, word: str | None) -> None:
        """A bare word that is nearly a command's name is a slip, not a source or a file."""
        if word and word.isalpha() and not os.path.exists(word) and suggestion(word, self.entries):
            self.get_command(ctx, word)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the table of commands with the help lines of the tree."""
        rows = [
            (name + (" (default)" if name == self.default_command else ""), entry.help)
            for name, entry in self.entries.items()
        ]
        with formatter.section("Commands"):
            formatter.write_dl(rows)


def _first_word(args: list[str]) -> str | None:
    """The first argument that is not a common option or the value of one."""
    takes_value = {"--profile", "-o", "--output"}
    skip = False
    for argument in args:
        if skip:
            skip = False
        elif argument in takes_value:
            skip = True
        elif not argument.startswith("-") or argument == "-":
            return argument
    return None


def load(name: str, leaf: Leaf) -> Any:
    """The command behind a leaf of the tree."""
    module, function = leaf.target.split(":")
    target = getattr(import_module(f"mmctl.cli.{module}"), function)
    application = typer.Typer(add_completion=False, rich_markup_mode=None)
    application.command(
        name, cls=Command, context_settings=getattr(target, "context_settings", None)
    )(target)
    command: Any = typer.main.get_command(application)
    command.formats = getattr(target, "formats", OUTPUTS)
    for parameter in command.params:
        if parameter.name == "output":
            *most, last = command.formats
            parameter.help = f"{', '.join(most)} or {last}."
    return command


def root() -> Group:
    """The whole command line."""
    _given.clear()
    about = "See, measure, place, trip and recover multimodal model servers."
    group = Group("mmctl", TREE, None, f"{about}\n\n\b\nExamples:\n{EXAMPLES}")
    group.params = [
        *group.params,
        TyperOption(
            param_decls=["--show-completion"], metavar="SHELL", is_eager=True,
            expose_value=False, callback=_show_completion,
            help="A script that completes commands: bash, zsh or fish.",
        ),
        TyperOption(
            param_decls=["--version"], is_flag=True, default=False, is_eager=True,
            expose_value=False, callback=_version, help="The version, and nothing else.",
        ),
    ]  # fmt: skip
    return group


def _show_completion(ctx: Any, _: Any, shell: str | None) -> None:
    if shell and not ctx.resilient_parsing:
        print(completion.script(shell))
        ctx.exit()


def _version(ctx: Any, _: Any, value: bool) -> None:
    if value:
        from mmctl import __version__

        print(f"mmctl {__version__}")
        ctx.exit()
