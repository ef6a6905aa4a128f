"""What Tab offers, asked for as the shells themselves ask."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from mmctl.cli.commands import TREE, Branch
from mmctl.engine.sources import SCHEMES

ROOT = Path(__file__).parents[2]
TAB = """
eval "$(mmctl --show-completion bash)"
COMP_LINE={line} COMP_POINT=${{#COMP_LINE}}
_mmctl_completion mmctl
printf '%s\\n' "${{COMPREPLY[@]}}"
"""


def _environment() -> dict[str, str]:
    return {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}


def _bash(line: str) -> list[str]:
    done = subprocess.run(
        ["bash", "-c", TAB.format(line=shlex.quote(line))],
        capture_output=True,
        text=True,
        env=_environment(),
        cwd=ROOT,
    )
    assert done.stderr == ""
    return done.stdout.split()


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("mmctl ", list(TREE)),
        ("mmctl pr", ["probe", "profile"]),
        ("mmctl breaker wa", ["watch"]),
        ("mmctl probe -o ", ["table", "json", "ndjson", "csv"]),
        ("mmctl probe node --profile pa", ["paper"]),
        ("mmctl breaker watch --dur", ["--duration"]),
        ("mmctl breaker guard --source nv", ["nvml:"]),
        ("mmctl probe nv", ["nvml:"]),
        ("mmctl probe node nv", ["nvml:"]),
        ("mmctl top REA", ["README.md"]),
        ("mmctl no-such-command x", []),
        ("mmctl schedule simulate azure --devices h100", ["h100_sxm"]),
        ("mmctl schedule plan azure --devices h100_sxm:2,l4", ["2,l40s", "2,l4"]),
        ("mmctl schedule sweep azure --policy per", ["perception"]),
        ("mmctl schedule simulate azure --model llama-3.1-8", ["llama-3.1-8b"]),
        ("mmctl breaker evaluate x.csv --rules fi", ["fits"]),
        ("mmctl breaker evaluate --scenarios --only bu", ["burst"]),
        ("mmctl breaker watch nvml: demo:b", ["burst"]),  # what is behind the colon is replaced
        ("mmctl top demo:", ["burst", "calm", "fault", "fragmentation", "leak", "stall"]),
        ("mmctl breaker watch host: --mode ob", ["observe"]),
        ("mmctl profile show pa", ["paper"]),
        ("mmctl fingerprint compare a b --cache h10", ["h100"]),
        ("mmctl breaker guard --respond shrink_images,cap", ["shrink_images,cap_output"]),
        ("mmctl breaker log --what tr", ["trip"]),
        ("mmctl schedule plan az", ["azure"]),
        ("mmctl schedule sweep READ", ["README.md"]),
        ("mmctl top demo --screen he", ["heatmap"]),
        ("mmctl top -o sv", ["svg"]),
        ("mmctl probe serve --print gr", ["grafana"]),
    ],
)
def test_bash(line, offered):
    assert _bash(line) == offered


def test_every_source_is_offered():
    assert _bash("mmctl doctor ")[: len(SCHEMES)] == [f"{name}:" for name in SCHEMES]


def test_a_group_offers_its_commands_though_one_is_its_default():
    group = TREE["breaker"]
    assert isinstance(group, Branch)
    assert _bash("mmctl breaker ") == list(group.commands)


@pytest.mark.skipif(shutil.which("fish") is None, reason="fish is not installed")
def test_fish_offers_commands_with_their_help_and_files(tmp_path):
    (tmp_path / "run.ndjson").touch()

    def offered(line: str) -> str:
        return subprocess.run(
            ["fish", "-c", f"mmctl --show-completion fish | source; complete -C '{line}'"],
            capture_output=True, text=True, check=True, env=_environment(), cwd=tmp_path,
        ).stdout  # fmt: skip

    assert "doctor\tWhat can be read here" in offered("mmctl doc")
    assert "run.ndjson" in offered("mmctl breaker replay ru")


def test_zsh_takes_the_script(mmctl):
    made = mmctl("--show-completion", "zsh")
    assert made.stdout.startswith("#compdef mmctl\n")
    if shutil.which("zsh"):
        subprocess.run(["zsh", "-n", "-c", made.stdout], check=True)


def test_another_shell_is_refused(mmctl):
    done = mmctl("--show-completion", "fsh")
    assert done.returncode == 2 and "did you mean 'fish'?" in done.stderr
