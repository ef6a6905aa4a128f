"""Make the man pages from the program itself: ``python tests/manual.py``.

Section 1: one page a command, one a group. What is the same on every page (exit status,
environment, files) is written here; the rest is the command's own help. Section 5:
``reference.py``.
"""

from __future__ import annotations

import re
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from click_man.man import ManPage

from mmctl import __version__
from mmctl.cli.app import root

FOLDER = Path(__file__).parents[1] / "man"
sys.path.insert(0, str(Path(__file__).parent))
import reference  # noqa: E402

# The date of a page is the date of the release that it describes.
DATE = "2026-11-29"

# Columns of a line of examples, in a page of 80 with its margin.
EXAMPLE = 72

COMMON = r""".SH EXIT STATUS
.TP
\fB0\fP
Done, nothing to report.
.TP
\fB1\fP
Failed: a broken file, a missing extra, a source that ended badly.
.TP
\fB2\fP
Usage: an unknown command, option, profile, scenario or format.
.TP
\fB3\fP
A finding: a trip, a conflict, an inconsistent answer, a false free, a problem of a profile.
.TP
\fB4\fP
No source could be read.
.TP
\fB130, 143\fP
Interrupted or terminated, after cleaning up.
.SH ENVIRONMENT
.TP
\fBMMCTL_PROFILE\fP
The profile in force where no \fB\-\-profile\fP names one.
.TP
\fBMMCTL_\fP\fITABLE\fP\fB_\fP\fIKEY\fP
A single value of the profile, as in MMCTL_BREAKER_MODE=observe; every key is in
\fBmmctl.toml\fP(5).
.TP
\fBMMCTL_AGENT\fP
For vLLM: the folder in which each of its workers makes the socket of an agent.
.TP
\fBXDG_CONFIG_HOME, XDG_STATE_HOME, XDG_CACHE_HOME, XDG_RUNTIME_DIR\fP
Where the files below are; by default ~/.config, ~/.local/state and ~/.cache.
.TP
\fBNO_COLOR\fP
No colour when it is set.
.SH FILES
.TP
\fI$XDG_CONFIG_HOME/mmctl/profiles/*.toml\fP
The user's profiles, in the form of \fBmmctl.toml\fP(5); \fI$XDG_CONFIG_HOME/mmctl/active\fP
names the one in force.
.TP
\fI./mmctl.toml\fP
The profile of a project, used when the user has chosen none.
.TP
\fI$XDG_STATE_HOME/mmctl\fP
The audit log and what the breaker and the dashboard remember over restarts.
.TP
\fI$XDG_CACHE_HOME/mmctl\fP
Compiled code; it may be removed at any time.
.TP
\fI$XDG_RUNTIME_DIR/mmctl\fP
Sockets and shared memory of running processes; \fI/tmp/mmctl\-UID\fP where
XDG_RUNTIME_DIR is not set.
"""


def pages() -> Iterator[tuple[str, str]]:
    """(file name, page) of every command and group, and of what they write and read."""
    yield from _walk(root(), None, "mmctl")
    yield from reference.pages(f'.TH "{{name}}" "5" "{DATE}" "{__version__}" "mmctl Manual"\n')


def _walk(command: Any, parent: Any, path: str) -> Iterator[tuple[str, str]]:
    context = command.make_context(path.split()[-1], [], parent=parent, resilient_parsing=True)
    context.info_name = path.split()[-1]
    yield f"man1/{path.replace(' ', '-')}.1", _page(command, context, path)
    for name in getattr(command, "entries", {}):
        yield from _walk(command.get_command(context, name), context, f"{path} {name}")


def _page(command: Any, context: Any, path: str) -> str:
    text, _, examples = (command.help or "").partition("Examples:")
    page = ManPage(path)
    page.version, page.date = __version__, DATE
    page.description = re.sub(r"[\b\f]", "", text).strip()
    page.short_help = page.description.split("\n\n")[0].replace("\n", " ").rstrip(".")
    page.description = re.sub(r"^([.'])", r"\\&\1", page.description, flags=re.MULTILINE)
    page.synopsis = " ".join(command.collect_usage_pieces(context))
    page.options = [
        record
        for parameter in command.get_params(context)
        if (record := parameter.get_help_record(context)) is not None
    ]
    body = str(page) + _commands(command, path)
    if path == "mmctl top":
        body += _keys()
    if examples.strip():
        lines = re.sub(r" *\\\n *", " ", textwrap.dedent(examples.strip("\n")).rstrip())
        shown = "\n".join(map(_narrow, lines.splitlines()))
        body += ".SH EXAMPLES\n.nf\n" + shown.replace("\\", r"\e").replace("-", r"\-") + "\n.fi\n"
    return body + COMMON + _see_also(context, path)


def _commands(group: Any, path: str) -> str:
    """The commands of a group, each by the name of its page."""
    entries = getattr(group, "entries", {})
    default = getattr(group, "default_command", None)
    body = ".SH COMMANDS\n" if entries else ""
    for name, entry in entries.items():
        page = reference.bold(f"{path} {name}(1)".replace(" ", "-"))
        body += f".TP\n{page}\n{_escaped(entry.help)}{' (default)' * (name == default)}\n"
    return body


def _narrow(line: str) -> str:
    """A line of examples within the page, where a pager would go on at the left edge: what it is
    about in a line of its own, options with their values together."""
    command, _, about = re.split(r"(?:( {2,})(?=\S)|$)", line, maxsplit=1)[:3]
    if about:
        return f"{command}\n    {about}" if command else f"    {about}"
    rows = [""]
    for part in re.findall(r"(?:-+\S+ (?!-))?(?:'[^']*'|\S)+", line):
        if rows[-1].strip() and len(rows[-1]) + len(part) + 3 > EXAMPLE:
            rows[-1] += " \\"
            rows.append(" ")
        rows[-1] += f" {part}" if rows[-1] else part
    return "\n".join(rows)


def _see_also(context: Any, path: str) -> str:
    """The pages beside and below this one, and the one above."""
    above = path.rpartition(" ")[0]
    around = [above] if above else []
    for parent, command in (
        (above, context.parent and context.parent.command),
        (path, context.command),
    ):
        around += [f"{parent} {name}" for name in getattr(command, "entries", {}) if parent]
    pages = [name.replace(" ", "-") for name in dict.fromkeys(around) if name != path]
    shown = ",\n".join(rf"\fB\%{name.replace('-', chr(92) + '-')}\fP(1)" for name in pages)
    return f".SH SEE ALSO\n{', '.join([shown, *map(reference.bold, reference.PAGES)])}\n"


def _keys() -> str:
    """The dashboard's keys, as its help shows them: those of every screen, then each one's own."""
    from mmctl.tui.keys import GENERAL
    from mmctl.tui.view import views

    tables = [("On every screen", GENERAL), *((name, view.keys) for name, view in views().items())]
    body = ".SH KEYS\n"
    for title, keys in tables:
        body += f".SS {title}\n"
        for key in keys:
            told = key.about + (" (where the dashboard may act)" if key.acts else "")
            body += f".TP\n\\fB{_escaped(key.shown({}))}\\fP ({key.name})\n{_escaped(told)}\n"
    return body + ".PP\nThe name in brackets moves a key in a profile: [screen] keys.\n"


def _escaped(text: str) -> str:
    return re.sub(r"^([.'])", r"\\&\1", text.replace("\\", r"\e").replace("-", r"\-"))


def main() -> int:
    """Write every page; a page of a command that is gone goes too."""
    made = dict(pages())
    for old in FOLDER.glob("man*/*"):
        if str(old.relative_to(FOLDER)) not in made:
            old.unlink()
    for name, page in made.items():
        (FOLDER / name).parent.mkdir(parents=True, exist_ok=True)
        (FOLDER / name).write_text(page)
    print(f"{len(made)} pages in {FOLDER.name}/")
    return 0


if __name__ == "__main__":
    sys.exit(main())
