"""What holds for the whole command line: floors, start-up, exit codes, messages."""

from __future__ import annotations

import json
import resource
import subprocess
import sys

import pytest

from mmctl.cli.commands import TREE, Branch

GROUPS = {name: entry for name, entry in TREE.items() if isinstance(entry, Branch)}
COMMANDS = [(name,) for name in TREE if name not in GROUPS] + [
    (group, name) for group, entry in GROUPS.items() for name in entry.commands
]


def test_import_contracts() -> None:
    from importlinter.cli import lint_imports

    assert lint_imports(no_cache=True) == 0


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_help_shows_examples_and_common_options(mmctl, command: tuple[str, ...]) -> None:
    done = mmctl(*command, "--help")
    assert done.returncode == 0, done.stderr
    assert "Examples:" in done.stdout and "--profile" in done.stdout


def test_mistakes_are_usage_errors_with_a_suggestion(mmctl) -> None:
    for arguments, hint in [
        (["profle"], "did you mean 'profile'"),
        (["profile", "list", "-o", "jsn"], "did you mean 'json'"),
        (["profile", "show", "defualt"], "did you mean 'default'"),
        (["profile", "show", "--nonsense"], "--nonsense"),
    ]:
        done = mmctl(*arguments)
        assert done.returncode == 2 and hint in done.stderr
        assert done.stderr.startswith("mmctl: error: ") and done.stderr.count("\n") == 1


def test_common_options_before_and_after(mmctl) -> None:
    for arguments in (["-o", "json", "profile", "list"], ["profile", "list", "-o", "json"],
                      ["profile", "-o", "json"]):  # fmt: skip
        done = mmctl(*arguments)
        assert done.returncode == 0 and json.loads(done.stdout)["schema"] == 1


def test_closed_pipe_is_silent() -> None:
    for arguments in ("profile show -o ndjson", "probe host: --interval 50ms -o ndjson"):
        command = f"{sys.executable} -m mmctl {arguments} | head -1; exit ${{PIPESTATUS[0]}}"
        done = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
        assert done.stderr == "" and done.stdout.count("\n") == 1 and done.returncode == 0


def test_start_up_cost_is_printed(mmctl, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["--version"], ["profile", "--help"]):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        assert mmctl(*arguments).returncode == 0
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        spent = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        with capsys.disabled():
            print(f"\nmmctl {' '.join(arguments)}: {1000 * spent:.0f} ms CPU")
