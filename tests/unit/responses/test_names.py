"""The names that rules may give are those that somebody carries out."""

from __future__ import annotations

import pytest

from mmctl.engine.breaker.actuators import ENGINES
from mmctl.engine.responses import names


def test_what_workers_engines_and_the_guard_do_has_a_known_name() -> None:
    treatment = pytest.importorskip("mmctl.guard.treatment")
    respond = pytest.importorskip("mmctl.demo.respond")
    asked = {name for engine in ENGINES.values() for name in (*engine.steps, *engine.advice)}
    done = {*respond.KNOWN, *treatment.RESPONSES, *treatment.AS_ASKED, *asked, "rebuild"}
    assert done == names.CARRIED_OUT


def test_a_name_that_nobody_has_is_said_with_the_nearest() -> None:
    assert names.unknown(["rebuild", "offload_kv", "degrade"]) == []
    assert names.unknown(["ofload_kv"]) == ["no response 'ofload_kv'; did you mean 'offload_kv'?"]
