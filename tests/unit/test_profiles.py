from __future__ import annotations

import re
from pathlib import Path

import pytest

from mmctl.engine import profiles
from mmctl.engine.access import memory_models
from mmctl.engine.errors import UsageError
from mmctl.engine.rules.rule import compile_rules


def write(folder: Path, text: str, name: str = "mine.toml") -> str:
    (folder / name).write_text(text)
    return str(folder / name)


def test_every_problem_is_reported_at_once_with_line_and_suggestion(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        'extends = "default"\n[sampling]\nintervall = "1s"\n[memory]\nreference = "16 parsecs"\n'
        '[breaker]\nmode = "observ"\nhalf_open_share = 7\n[[breaker.rules]]\nname = "x"\n',
    )
    _, problems = profiles.check(path)
    found = {problem.key: (problem.origin.line, problem.message) for problem in problems}
    assert found["sampling.intervall"] == (3, "unknown key; did you mean 'interval'?")
    assert found["memory.reference"][0] == 5 and "unit of bytes" in found["memory.reference"][1]
    assert found["breaker.mode"][0] == 7 and "'observe'" in found["breaker.mode"][1]
    assert found["breaker.half_open_share"][0] == 8
    assert found["breaker.rules.x.when"] == (9, "missing")
    assert len(problems) == 5


def test_extends_overrides_and_keeps_provenance(tmp_path: Path) -> None:
    write(tmp_path, '[sampling]\ninterval = "1s"\nwatermark = "1min"\n', "base.toml")
    path = write(tmp_path, 'extends = "base.toml"\n[sampling]\ninterval = "250ms"\n')
    loaded = profiles.load(path)
    assert loaded.profile.sampling.interval_s == 0.25
    assert loaded.profile.sampling.watermark_s == 60
    assert loaded.origins["sampling.interval"].line == 3
    assert loaded.origins["sampling.watermark"].profile == "base"
    assert loaded.origins["sources.default"].profile == "default"


def test_rules_merge_by_name_and_can_be_dropped(tmp_path: Path) -> None:
    write(
        tmp_path,
        '[[breaker.rules]]\nname = "a"\nwhen = "x > 1"\nhold = "2s"\n'
        '[[breaker.rules]]\nname = "b"\nwhen = "x > 2"\n[breaker]\ninherit_rules = false\n',
        "base.toml",
    )
    changed = write(tmp_path, 'extends = "base.toml"\n[[breaker.rules]]\nname = "a"\nhold = "5s"\n')
    rules = profiles.load(changed).profile.breaker.rules
    assert [(rule.name, rule.when, rule.hold_s) for rule in rules] == [
        ("a", "x > 1", 5.0), ("b", "x > 2", 0.0),
    ]  # fmt: skip
    dropped = write(tmp_path, 'extends = "base.toml"\n[breaker]\ninherit_rules = false\n', "c.toml")
    assert profiles.load(dropped).profile.breaker.rules == ()


def test_a_profile_that_extends_itself_is_refused(tmp_path: Path) -> None:
    write(tmp_path, 'extends = "b.toml"\n', "a.toml")
    path = write(tmp_path, 'extends = "a.toml"\n', "b.toml")
    with pytest.raises(UsageError, match="extends itself"):
        profiles.load(path)


def test_environment_overrides_a_value(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MMCTL_BREAKER_MODE", "enforce")
    monkeypatch.setenv("MMCTL_SAMPLING_INTERVAL", "2s")
    loaded = profiles.load("default")
    assert loaded.profile.breaker.mode == "enforce"
    assert loaded.profile.sampling.interval_s == 2
    assert str(loaded.origins["breaker.mode"]) == "environment MMCTL_BREAKER_MODE"


def test_selection_order(clean_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert profiles.selected()[0] == "default"
    write(tmp_path, "", "mmctl.toml")
    assert profiles.selected()[0] == "mmctl.toml"
    folder = clean_home / "config" / "mmctl"
    folder.mkdir()
    (folder / "active").write_text("paper\n")
    assert profiles.selected()[0] == "paper"
    monkeypatch.setenv("MMCTL_PROFILE", "cpu")
    assert profiles.selected()[0] == "cpu"


def test_every_theme_has_its_colours() -> None:
    from mmctl.tui.palette import PALETTES

    assert tuple(PALETTES) == profiles.THEMES


def test_unknown_profile_suggests() -> None:
    with pytest.raises(UsageError, match="did you mean 'default'"):
        profiles.load("defualt")


@pytest.mark.parametrize("name", sorted(profiles.available()))
def test_a_shipped_profile_is_valid_and_says_what_it_is_for(name):
    loaded, problems = profiles.check(name)
    assert loaded is not None and problems == []
    compile_rules(loaded.profile.breaker.rules)
    assert profiles.find(name).read_text().startswith("# ")


@pytest.mark.parametrize(
    "name", ["gpu-80gb", "h100x8", "a100-pcie-pairs", "l40s", "ascend-910b", "cpu"]
)
def test_every_value_of_a_node_s_profile_is_explained(name):
    """By a comment on its line, or above it or the first key of its block."""
    lines = profiles.find(name).read_text().splitlines()
    for number, line in enumerate(lines):
        if not re.match(r"\w+ = ", line) or line.startswith("extends"):
            continue
        before = lines[:number]
        while before and re.match(r"\w+ = ", before[-1]):
            before.pop()
        assert "  #" in line or before[-1].startswith("#"), f"{name}:{number + 1}: {line}"
    assert memory_models.find(profiles.load(name).profile.fingerprint.cache)
