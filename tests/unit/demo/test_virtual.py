"""The demo in virtual time: the truth of a seed, and what a breaker makes of it."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mmctl.engine import profiles
from mmctl.engine.errors import MmctlError

pytest.importorskip("torch", reason="the demo's scenarios need torch")

from mmctl.demo import score
from mmctl.demo.virtual import START_NS, Outcome, VirtualRun, run_seed, tapes_and_weights

PROFILE = profiles.load("default").profile


def run(mode: profiles.Mode, scenario: str = "burst", seed: int = 0) -> Outcome:
    return VirtualRun(*tapes_and_weights(), scenario, seed, PROFILE, mode).run()


def test_a_seed_has_one_truth_and_the_breaker_another_end() -> None:
    watched, off = run("observe"), run("off")
    assert watched.oom_ns is not None and off.oom_ns == watched.oom_ns, "one seed, one sequence"
    assert START_NS < watched.trips[0][0] <= watched.oom_ns - 100_000_000
    enforced = run("enforce")
    assert enforced.oom_ns is None and enforced.closed
    assert enforced.completed > watched.completed
    assert run("off", seed=1).oom_ns != watched.oom_ns


@pytest.mark.parametrize("scenario", ["burst", "fragmentation", "leak"])
def test_the_truth_from_the_first_command_on_is_that_of_a_run_without_a_breaker(
    scenario: str,
) -> None:
    oom_ns, enforced = run_seed(scenario, 3, PROFILE)
    assert enforced.trips and oom_ns == run("off", scenario, 3).oom_ns
    assert enforced == run("enforce", scenario, 3), "keeping a twin changes nothing"


@pytest.mark.parametrize("scenario", ["burst", "leak"])
def test_the_compiled_loop_decides_alike(scenario: str) -> None:
    pytest.importorskip("numba", reason="the compiled loop needs numba")
    assert run_seed(scenario, 1, PROFILE, True) == run_seed(scenario, 1, PROFILE, False)


def test_the_table_counts_by_the_truth_and_in_halves() -> None:
    found = [
        score.Run("burst", 0, True, True, True, True, 0.1),
        score.Run("burst", 1, True, False, False, False, None),
        score.Run("burst", 2, False, False, False, False, None),
        score.Run("burst", 3, False, True, False, True, None),
    ]
    table = score.score("burst", "all", range(4), found)
    assert (table.runs, table.troubled, table.tripped, table.prevented) == (4, 2, 2, 1)
    assert (table.accuracy_ratio, table.false_trip_ratio, table.recovered) == (0.5, 0.5, 2)
    assert (table.lead_p50_s, table.lead_min_s) == (0.1, 0.1)
    assert score.halves(range(5)) == (range(3), range(3, 5))


def test_a_trip_at_the_end_of_the_unattended_run_came_too_late() -> None:
    late = Outcome(None, ((START_NS + 10**9, "fits"),), True, 5, START_NS + 10**10)
    found = score.judge("burst", 0, START_NS + 10**9, late)
    assert found.troubled and not found.tripped and found.lead_s is None


@pytest.mark.parametrize("seed", [5000, 5001])
def test_a_leak_is_prevented_however_often_it_comes_back(seed: int) -> None:
    oom_ns, enforced = run_seed("leak", seed, PROFILE)
    assert oom_ns is not None and enforced.oom_ns is None


def test_results_are_kept_line_by_line_and_not_mixed_with_other_rules(tmp_path: Path) -> None:
    path = tmp_path / "seeds.ndjson"
    first = score.Run("burst", 0, True, True, True, True, 0.1)
    kept = score.Results(path, PROFILE)
    kept.keep(first)
    kept.close()
    with path.open("ab") as file:
        file.write(b'["cut by a ki')
    again = score.Results(path, PROFILE)
    assert again.known == {("burst", 0): first}
    again.keep(score.Run("calm", 7, False, False, False, False, None))
    again.close()
    with pytest.raises(MmctlError, match="other runs"):
        score.Results(path, profiles.load("paper").profile)
    with pytest.raises(MmctlError, match="other runs"):
        score.Results(path, PROFILE, "measured")
    assert len(score.Results(path, PROFILE).known) == 2
    path.write_bytes(b"[]\n")
    with pytest.raises(MmctlError, match="line 1"):
        score.Results(path, PROFILE)


def test_an_interrupted_evaluation_prints_what_is_done_and_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "seeds.ndjson"
    given = f"--scenarios --only fragmentation --seeds 400 --results {path} -o ndjson"
    process = subprocess.Popen(
        [sys.executable, "-m", "mmctl", "breaker", "evaluate", *given.split()],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    while process.poll() is None:
        if path.exists() and path.read_bytes().count(b"\n") >= 2:
            break
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    out, error = process.communicate(timeout=60)
    assert process.returncode == 130, error
    done = path.read_bytes().count(b"\n")
    assert f'"runs":{done},' in out.splitlines()[-1].replace(" ", "")
    known = score.Results(path, PROFILE).known
    assert len(known) == done < 400
