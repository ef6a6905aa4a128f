"""What `mmctl profile` answers to a profile with mistakes of every kind."""

from __future__ import annotations

import json

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
    rule = next(key for key in problems if key.startswith("breaker.rules."))
    lines = {key: one["line"] for key, one in problems.items()}
    assert lines == {"foo": 1, "breaker.mde": 4, rule: 7, "export.listen": 9}
    assert "did you mean 'free_bytes'?" in problems[rule]["message"]
    assert {one["file"] for one in problems.values()} == {str(path)}


def test_a_profile_in_force_is_validated_by_the_name_it_was_given(mmctl, tmp_path):
    assert mmctl("profile", "use", "paper").returncode == 0
    done = mmctl("profile", "validate", "-o", "json")
    assert (done.returncode, json.loads(done.stdout)["name"]) == (0, "paper")
