"""Shell completion: the script for a shell, and the answers that it asks for at each Tab.

    eval "$(mmctl --show-completion bash)"

Typer makes both; here are the names that mmctl knows by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from glob import escape, glob
from pathlib import Path
from typing import Any, TypeAlias

from typer._completion_classes import completion_init
from typer._completion_shared import get_completion_script

from mmctl.engine.errors import UsageError, suggestion

VARIABLE = "_MMCTL_COMPLETE"
SHELLS = ("bash", "zsh", "fish")


# By the line, not by bash's words: it parts demo:burst at the colon, where completion begins.
BASH = r"""_mmctl_completion() {
    local line="${COMP_LINE:0:COMP_POINT}" IFS=$' \t\n'
    local -a words
    read -ra words <<< "$line"
    [[ $line == *[[:space:]] ]] && words+=("")
    local last="${words[-1]}"
    IFS=$'\n'
    COMPREPLY=($(COMP_WORDS="${words[*]}" COMP_CWORD=$((${#words[@]} - 1)) \
        _MMCTL_COMPLETE=complete_bash "$1"))
    if [[ $last == *:* && $COMP_WORDBREAKS == *:* ]]; then
        COMPREPLY=("${COMPREPLY[@]#"${last%:*}:"}")
    fi
}
complete -o default -F _mmctl_completion mmctl"""


def script(shell: str) -> str:
    """What ``shell`` evaluates to complete mmctl; UsageError for an unknown shell."""
    if shell not in SHELLS:
        raise UsageError(
            f"no completion for '{shell}': one of {', '.join(SHELLS)}{suggestion(shell, SHELLS)}"
        )
    if shell == "bash":
        return BASH
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


Offer: TypeAlias = Callable[[Any, list[str], str], list[str]]


def _of(names: Callable[[], Iterable[str]]) -> Offer:
    """Offers the names that begin so, behind the last comma where there are several."""

    def offer(ctx: Any, words: list[str], incomplete: str) -> list[str]:
        before, comma, word = incomplete.rpartition(",")
        return [f"{before}{comma}{name}" for name in names() if name.startswith(word)]

    return offer


def _devices() -> Iterable[str]:
    from mmctl.engine.schedule import fleet

    return fleet.tables()[0]


def _models() -> Iterable[str]:
    from mmctl.engine.schedule import fleet

    return fleet.tables()[1]


def _policies() -> Iterable[str]:
    from mmctl.engine import plugins
    from mmctl.engine.schedule.policies import POLICIES

    return (*POLICIES, *plugins.named("mmctl.policies"), "all")


def _rules() -> Iterable[str]:
    from mmctl.engine.profiles import load

    return (rule.name for rule in load(None).profile.breaker.rules)


def _scenarios() -> Iterable[str]:
    from mmctl.engine.sources.demo import SCENARIOS

    return SCENARIOS


def _treatments() -> Iterable[str]:
    with suppress(ImportError):  # without the extra 'guard' there is no guard either
        from mmctl.guard.treatment import RESPONSES

        return sorted(RESPONSES)
    return ()


def _audited() -> Iterable[str]:
    from mmctl.engine.breaker.store import AUDITED

    return sorted(AUDITED)


def _targets() -> Iterable[str]:
    from mmctl.engine.breaker.store import read_state

    state = read_state()
    return sorted(state.targets) if state else ()


def _caches() -> Iterable[str]:
    from mmctl.engine.access.memory_models import MODELS

    return MODELS


def words(*known: str) -> Offer:
    """Offers names that are known where the option is declared."""
    return _of(lambda: known)


devices, models, policies = _of(_devices), _of(_models), _of(_policies)
rules, scenarios, caches = _of(_rules), _of(_scenarios), _of(_caches)
treatments, audited, targets = _of(_treatments), _of(_audited), _of(_targets)


def sources(ctx: Any, words: list[str], incomplete: str) -> list[tuple[str, str]]:
    """Schemes of sources that begin so, each with what it is, and files; scenarios of demo:."""
    name, colon, begun = incomplete.partition(":")
    if name == "demo" and colon:
        return [(f"demo:{one}", "") for one in _scenarios() if one.startswith(begun)]
    from mmctl.engine import plugins
    from mmctl.engine.sources import PLUGINS, SCHEMES

    known = {name: scheme.about for name, scheme in SCHEMES.items()}
    known |= {name: "of a package" for name in plugins.named(PLUGINS) if name not in known}
    found = [(f"{name}:", about) for name, about in known.items() if name.startswith(incomplete)]
    return found + _files(incomplete)


def words_or_files(*known: str) -> Callable[[Any, list[str], str], list[tuple[str, str]]]:
    """Offers names that are known where the argument is declared, and files."""

    def offer(ctx: Any, words: list[str], incomplete: str) -> list[tuple[str, str]]:
        return [(name, "") for name in known if name.startswith(incomplete)] + _files(incomplete)

    return offer


def _files(incomplete: str) -> list[tuple[str, str]]:
    files = (Path(path) for path in sorted(glob(f"{escape(incomplete)}*")))
    return [(f"{path}/" if path.is_dir() else str(path), "") for path in files]
