"""Shell completion: the script for a shell, and the answers that it asks for at each Tab.

    eval "$(mmctl --show-completion bash)"

Typer makes both; here are the names that mmctl knows by itself.
"""

from __future__ import annotations

from contextlib import suppress
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

    return [name for name in OUTPUTS if name.startswith(incomplete)]
