"""Rules over live records: three truths, staleness, joins between subjects."""

from __future__ import annotations

from mmctl.engine import profiles
from mmctl.engine.records import AnyRecord, Device, Event, Fits, Memory, Pool, Request, Serving
from mmctl.engine.rules.live import Live
from mmctl.engine.rules.rule import Verdict, compile_rules

SECOND = 10**9


def pool(at: float, **more: object) -> Pool:
    figures = {
        "reserved_bytes": 100, "allocated_bytes": 60, "free_bytes": 40, "largest_free_bytes": 10,
        "releasable_bytes": 0, "fragmentation_ratio": 0.75,
    }  # fmt: skip
    return Pool(ts_ns=round(at * SECOND), node="n", device="gpu0", **{**figures, **more})  # type: ignore[arg-type]


def serving(at: float, instance: str = "a", **more: object) -> Serving:
    return Serving(
        ts_ns=round(at * SECOND), node="n", engine="vllm", instance=instance, **more  # type: ignore[arg-type]
    )  # fmt: skip


def device(at: float, name: str = "gpu0", **more: object) -> Device:
    return Device(ts_ns=round(at * SECOND), node="n", device=name, kind="gpu", **more)  # type: ignore[arg-type]


def verdict(when: str, *given: AnyRecord, now: float | None = None, **settings: object) -> Verdict:
    """The only verdict of one rule after ``given``."""
    rule = profiles.Rule(name="r", when=when, **settings)  # type: ignore[arg-type]
    live = Live(compile_rules([rule]))
    for record in given:
        live.step(record)
    last = given[-1].ts_ns  # type: ignore[union-attr]
    (found,) = live.verdicts(last if now is None else round(now * SECOND))
    return found


def test_a_verdict_names_value_threshold_and_age() -> None:
    found = verdict("fragmentation_ratio > 65%", pool(1), now=2)
    assert found.truth is True and found.subject == "gpu0"
    (item,) = found.inputs
    assert (item.value, item.comparison, item.threshold, item.age_s) == (0.75, ">", 0.65, 1.0)
    assert item.basis == "measured"


def test_stale_missing_and_absent_inputs_are_unknown_with_a_reason() -> None:
    stale = verdict("fragmentation_ratio > 65%", pool(1), now=9, max_age_s=5.0)
    assert stale.truth is None and "8 s old, more than 5 s" in stale.reason
    missing = verdict("fragmentation_ratio > 65% and running > 3", pool(1))
    assert missing.truth is None and "no serving record" in missing.reason
    absent = verdict("power_w > 9", device(1, absent={"power_w": "not supported"}))
    assert absent.truth is None and absent.reason == "not supported"
    nan = verdict("power_w > 9", device(1, power_w=float("nan")))
    assert nan.truth is None


def test_kleene_logic() -> None:
    given = device(1, temperature_c=95.0)
    assert verdict("temperature_c > 90 or power_w > 9", given).truth is True
    assert verdict("temperature_c > 99 or power_w > 9", given).truth is None
    assert verdict("temperature_c > 99 and power_w > 9", given).truth is False
    assert verdict("not (power_w > 9)", given).truth is None
    assert verdict("temperature_c > 90 and not known(power_w)", given).truth is True


def test_words_lists_and_division() -> None:
    given = device(1, throttle=("hw_slowdown",), power_w=0.0)
    assert verdict('"hw_slowdown" in throttle', given).truth is True
    assert verdict('"sw_power_cap" not in throttle', given).truth is True
    assert verdict("1 / power_w > 0", given).truth is None


def test_a_device_reads_its_own_instance_or_none_where_several_could_be_meant() -> None:
    when = "fragmentation_ratio > 65% and waiting > 0"
    assert verdict(when, pool(1), serving(1, waiting=2)).truth is True
    two = (pool(1), serving(1, waiting=2), serving(1, "b", waiting=2), pool(9))
    assert verdict(when, *two, max_age_s=3.0).truth is None
    named = (device(0, group="b"), pool(1), serving(1, waiting=0), serving(1, "b", waiting=2))
    assert verdict(when, *named).truth is True


def test_a_late_record_changes_nothing() -> None:
    assert verdict("power_w > 9", device(2, power_w=5.0), device(1, power_w=50.0)).truth is False


def test_occasional_records_keep_what_they_do_not_carry() -> None:
    alloc = Memory(ts_ns=SECOND, node="n", device="gpu0", action="alloc", address=0, size_bytes=99)
    free = Memory(ts_ns=SECOND, node="n", device="gpu0", action="free", address=0, size_bytes=7)
    assert verdict("size_bytes > 50", alloc, free).truth is True


def test_counts_of_conditions() -> None:
    passes = [
        Event(ts_ns=at * SECOND, node="n", what="reclaim", evidence={"recovered_ratio": ratio})
        for at, ratio in ((1, 0.9), (20, 0.1), (40, 0.2))
    ]
    when = "count(reclaim_ratio < 30%, 60s) >= 2"
    assert verdict(when, *passes, max_age_s=60.0).truth is True
    assert verdict(when, *passes[:2], max_age_s=60.0).truth is False


def test_requests_by_modality() -> None:
    done = Request(
        ts_ns=SECOND, node="n", id="1", images=2, state="completed",
        stages={"queue_wait_s": 0.5, "vision_encode_s": 1.0},
    )  # fmt: skip
    assert verdict("vision.request_latency_s > 1", done).truth is True
    assert verdict("text.request_latency_s > 1", done).truth is None


def test_the_dry_run_is_a_signal() -> None:
    no = pool(1, fits=Fits(fits=False, allocations=3, peak_bytes=9, need_bytes=5, cause="capacity"))
    found = verdict("not fits and fits_cause == 'capacity'", no)
    assert found.truth is True
    assert found.inputs[0].name == "fits" and found.inputs[0].value is False


def test_why_it_is_unknown_is_looked_for_on_both_sides() -> None:
    def why(when: str, *given: AnyRecord) -> str:
        return verdict(when, *given).reason

    none = device(1, temperature_c=50.0, power_w=0.0)
    assert why('"hw_slowdown" in throttle', none) == "throttle is absent"
    assert why("power_w > power_limit_w", none) == "power_limit_w is absent"
    assert why("1 / power_w > 0", none).startswith("1 / power_w > 0 has no value, as a division by")
    slow = device(1, throttle=("hw_slowdown",))
    assert why('"hot" in throttle', slow) == "throttle holds hot is false at hw_slowdown"
    quick = device(1, throttle=())
    assert why('"hot" in throttle', quick) == "throttle holds hot is false at none"
    assert why('"hot" not in throttle', quick) == "throttle lacks hot is true at none"
