"""Shell completion: the script for a shell, and the answers that it asks for at each Tab.

    eval "$(mmctl --show-completion bash)"

Typer makes both; here are the names that mmctl knows by itself.
"""

from __future__ import annotations

from contextlib import suppress
from glob import escape, glob
from pathlib import Path
from typing import Any

from typer._completion_classes import completion_init
from typer._completion_shared import get_completion_script

from mmctl.engine.errors import UsageError, suggestion

VARIABLE = "_MMCTL_COMPLETE"
SHELLS = ("bash", "zsh", "fish")


def script(shell: str) -> str:
    """What ``shell`` evaluates to complete mmctl; UsageError for an unknown shell."""
    if shell not in SHELLS:
        raise UsageError(
            f"no completion for '{shell}': one of {', '.join(SHELLS)}{suggestion(shell, SHELLS)}"
        )
    made = get_completion_script(prog_name="mmctl", complete_var=VARIABLE, shell=shell)
    return made.replace("--no-files ", "")  # most arguments of mmctl are files


def answer(root: Any) -> None:
    """Print what may come next on the line being typed, and exit; nothing where that is unclear."""
    completion_init()
    with suppress(UsageError):  # a word before the cursor is wrong: Enter will say so
        root.main([], prog_name="mmctl", complete_var=VARIABLE, standalone_mode=False)


def profiles(ctx: Any, words: list[str], incomplete: str) -> list[str]:
    """Names of profiles that begin so."""
    from mmctl.engine.profiles import available

    return [name for name in available() if name.startswith(incomplete)]


def outputs(ctx: Any, words: list[str], incomplete: str) -> list[str]:
    """Formats that begin so."""
    from mmctl.cli.app import OUTPUTS

    formats = getattr(ctx.command, "formats", OUTPUTS)
    return [name for name in formats if name.startswith(incomplete)]


def sources(ctx: Any, words: list[str], incomplete: str) -> list[tuple[str, str]]:
    """Schemes of sources that begin so, each with what it is, and files."""
    from mmctl.engine import plugins
    from mmctl.engine.sources import PLUGINS, SCHEMES

    known = {name: scheme.about for name, scheme in SCHEMES.items()}
    known |= {name: "of a package" for name in plugins.named(PLUGINS) if name not in known}
    found = [(f"{name}:", about) for name, about in known.items() if name.startswith(incomplete)]
    files = (Path(path) for path in sorted(glob(f"{escape(incomplete)}*")))
    return found + [(f"{path}/" if path.is_dir() else str(path), "") for path in files]
