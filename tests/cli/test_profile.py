"""What `mmctl profile` answers to a profile with mistakes of every kind."""

from __future__ import annotations

import json
import os

import pytest

BROKEN = """\
[foo]
a = 1
[breaker]
mde = "observe"
[[breaker.rules]]
name = "a"
when = "fre_bytes > 3"
[export]
listen = 3
"""


def test_validate_reports_every_problem_with_its_line(mmctl, tmp_path):
    path = tmp_path / "broken.toml"
    path.write_text(BROKEN)
    done = mmctl("profile", "validate", str(path), "-o", "json")
    assert done.returncode == 3
    problems = {one["key"]: one for one in json.loads(done.stdout)["problems"]}
    rule = "breaker.rules.a.when"
    lines = {key: one["line"] for key, one in problems.items()}
    assert lines == {"foo": 1, "breaker.mde": 4, rule: 7, "export.listen": 9}
    assert "did you mean 'free_bytes'?" in problems[rule]["message"]
    assert {one["file"] for one in problems.values()} == {str(path)}


def test_a_profile_in_force_is_validated_by_the_name_it_was_given(mmctl, tmp_path):
    assert mmctl("profile", "use", "paper").returncode == 0
    done = mmctl("profile", "validate", "-o", "json")
    assert (done.returncode, json.loads(done.stdout)["name"]) == (0, "paper")


NONSENSE = """\
[sources]
default = ["nvmll:", "host:"]
[modality]
vision = ["vit", "(abc"]
[responses]
order = ["cap_bach"]
[fingerprint]
cache = "h1000"
[screen]
keys = ["qit=Q", "pause=f"]
[[breaker.rules]]
name = "too_hot"
when = "temperature_c > 16MiB"
hold = "soon"
clear = "temperature_c"
respond = ["hold_admission", "fly_away"]
[[guard.rules]]
name = "full"
when = "kv_ratio > 85"
respond = ["teleport"]
[[guard.families]]
name = "ours"
match = "llava("
config = {}
"""


def test_names_patterns_and_units_that_no_room_knows_are_problems(mmctl, tmp_path):
    path = tmp_path / "nonsense.toml"
    path.write_text(NONSENSE)
    done = mmctl("profile", "validate", str(path), "-o", "json")
    found = json.loads(done.stdout)["problems"]
    assert done.returncode == 3
    assert sorted((one["line"], one["key"]) for one in found) == [
        (2, "sources.default"),
        (4, "modality.vision"),
        (6, "responses.order"),
        (8, "fingerprint.cache"),
        (10, "screen.keys"),
        (13, "breaker.rules.too_hot.when"),
        (14, "breaker.rules.too_hot.hold"),
        (15, "breaker.rules.too_hot.clear"),
        (16, "breaker.rules.too_hot.respond"),
        (19, "guard.rules.full.when"),
        (20, "guard.rules.full.respond"),
        (23, "guard.families.ours.match"),
    ]
    said = {one["key"]: one["message"] for one in found}
    assert "did you mean 'nvml:'?" in said["sources.default"]
    assert "did you mean 'cap_batch'?" in said["responses.order"]
    assert "did you mean 'quit'?" in said["screen.keys"]
    assert said["breaker.rules.too_hot.when"] == "'temperature_c' is in °C, '16MiB' in bytes"
    assert "did you mean 85%?" in said["guard.rules.full.when"]


@pytest.mark.parametrize("name", ["cpu", "paper", "ascend-910b", "h100x8"])
def test_a_shipped_profile_is_valid(mmctl, name):
    done = mmctl("profile", "validate", name)
    assert (done.returncode, done.stdout) == (0, f"profile '{name}' is valid\n")


def test_the_summary_of_a_broken_profile_points_to_all_problems(mmctl, tmp_path):
    path = tmp_path / "broken.toml"
    path.write_text(BROKEN)
    done = mmctl("profile", "show", str(path))
    assert done.returncode == 2
    assert f"all that is wrong with it: mmctl profile validate {path}" in done.stderr


def test_a_breaker_starts_with_no_response_that_nobody_knows(mmctl, tmp_path):
    path = tmp_path / "strange.toml"
    path.write_text('[responses]\norder = ["ofload_kv"]\n')
    done = mmctl("breaker", "watch", "demo:calm", "--duration", "1s", "--profile", str(path))
    assert done.returncode == 2
    assert "[responses] order: no response 'ofload_kv'; did you mean 'offload_kv'?" in done.stderr


def test_a_variable_that_sets_nothing_is_said_and_no_error(mmctl):
    ours = {"MMCTL_BREAKER_MOED": "off", "MMCTL_PROFIEL": "x", "MMCTL_BREAKER_MODE": "off"}
    others = {"MMCTL_WEATHER": "fine", "MMCTL_HOOK_FOLDER": "/nowhere", "MMCTL_PLAIN": ""}
    done = mmctl("profile", "validate", "default", env={**os.environ, **ours, **others})
    assert done.returncode == 0
    assert done.stderr.splitlines() == [
        f"{name} in the environment sets nothing; did you mean '{meant}'?"
        for name, meant in (
            ("MMCTL_BREAKER_MOED", "MMCTL_BREAKER_MODE"), ("MMCTL_PROFIEL", "MMCTL_PROFILE"),
        )
    ]  # fmt: skip


def test_what_a_profile_says_of_itself_is_a_whole_sentence(mmctl):
    rows = json.loads(mmctl("profile", "list", "-o", "json").stdout)["profiles"]
    assert all(row["about"].endswith(".") for row in rows)


def test_a_choice_is_taken_back_and_the_project_holds_again(mmctl, tmp_path):
    (tmp_path / "mmctl.toml").write_text('extends = "paper"\n')

    def in_force(*arguments: str) -> str:
        done = mmctl("profile", "use", *arguments, cwd=tmp_path)
        assert done.returncode == 0
        return done.stderr

    assert "'cpu' is in force" in in_force("cpu")
    assert "'mmctl.toml' is in force: project file" in in_force("--none")
    done = mmctl("profile", "use", cwd=tmp_path)
    assert done.returncode == 2 and "--none" in done.stderr


def test_a_choice_that_the_environment_hides_says_so(mmctl):
    environment = {**os.environ, "MMCTL_PROFILE": "paper"}
    done = mmctl("profile", "use", "cpu", env=environment)
    assert "'paper' is in force: environment MMCTL_PROFILE" in done.stderr
