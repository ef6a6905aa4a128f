"""Other people's columns, labels, scores and simulated streams."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mmctl.engine import profiles
from mmctl.engine.breaker.evaluate import Observed, observe, read_labels, score, wilson
from mmctl.engine.breaker.foreign import open_foreign
from mmctl.engine.breaker.simulate import evaluate_stream
from mmctl.engine.breaker.tables import parse_map
from mmctl.engine.errors import MmctlError, UsageError
from mmctl.engine.records import AnyRecord, Device, Host, Pool, Serving

PROFILE = profiles.load("default").profile
SECOND = 10**9


def records(path: Path, text: str, mapping: str = "") -> list[AnyRecord]:
    path.write_text(text)
    found = open_foreign(str(path), mapping)
    assert found is not None
    return list(found)


def test_columns_by_map_with_units_labels_and_absent_values(tmp_path: Path) -> None:
    first, second = records(
        tmp_path / "a.csv",
        "when,card,temp,free_mb,util,why\n2026-01-01 00:00:00,0,71 C,512,85%,hw_slowdown|x\n"
        "2026-01-01T00:00:01Z,1,[N/A],1024,0.5,\n",
        "ts=when,card=device,temp=temperature_c,free_mb=device.free_bytes*1MiB,util=sm_ratio,"
        "why=throttle",
    )
    assert isinstance(first, Device) and isinstance(second, Device)
    assert (first.device, first.temperature_c, first.free_bytes) == ("0", 71.0, 512 * 2**20)
    assert first.throttle == ("hw_slowdown", "x") and first.sm_ratio == 0.85
    assert second.temperature_c is None and second.throttle is None
    assert second.ts_ns - first.ts_ns == SECOND
    page, state = records(
        tmp_path / "b.csv", "ts,wait,frag\n1790000000.5,3,0.7\n",
        "wait=waiting,frag=fragmentation_ratio",
    )  # fmt: skip
    assert isinstance(page, Serving) and page.waiting == 3
    assert isinstance(state, Pool) and state.fragmentation_ratio == 0.7
    assert page.ts_ns == 1_790_000_000_500_000_000


def test_what_nvidia_smi_logs_needs_no_map(tmp_path: Path) -> None:
    head = (
        "timestamp, index, utilization.gpu [%], memory.used [MiB], power.draw [W], "
        "temperature.gpu, clocks_event_reasons.active\n"
    )
    found = records(
        tmp_path / "smi.csv",
        head + "2026/01/31 12:00:00.100, 0, 97 %, 512 MiB, 312.50 W, 71, 0x0000000000000004\n"
        "2026/01/31 12:00:00.200, 1, 97, 512, [N/A], 71, 0x0000000000000048\n",
    )
    first, second = found
    assert isinstance(first, Device) and isinstance(second, Device)
    assert (first.device, second.device, second.ts_ns - first.ts_ns) == ("0", "1", 10**8)
    for one in found:
        assert (one.sm_ratio, one.used_bytes) == (pytest.approx(0.97), 512 * 2**20)  # type: ignore[union-attr]
    assert (first.power_w, second.power_w) == (312.5, None)
    assert first.throttle == ("sw_power_cap",)
    assert second.throttle == ("hw_slowdown", "hw_thermal_slowdown")


def test_texts_of_out_of_memory_errors_show_what_is_certain(tmp_path: Path) -> None:
    new = (
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate {} GiB. GPU 0 has a total "
        "capacity of 31.74 GiB of which 3.56 GiB is free. Including non-PyTorch memory, this "
        "process has 28.1 GiB memory in use. Of the allocated memory 27.43 GiB is allocated by "
        "PyTorch, and 32.62 MiB is reserved by PyTorch but unallocated.\n"
    )
    old = (
        "RuntimeError: CUDA out of memory. Tried to allocate 2.00 GiB (GPU 0; 23.70 GiB total "
        "capacity; 21.90 GiB already allocated; 1.10 GiB free; 22.00 GiB reserved in total by "
        "PyTorch)\n"
    )
    text = "INFO serving\n" + new.format("4.69") + new.format("3.50") + old
    found = records(tmp_path / "server.log", text)
    rooms = [pool.headroom_bytes for pool in found if isinstance(pool, Pool)]
    assert rooms[0] < 0 < rooms[1] and rooms[2] < 0  # type: ignore[operator]
    assert [alarm.device for alarm in observe(found, PROFILE).alarms] == ["message1", "message3"]
    some = '{"tried": "2 GiB", "free": "1 GiB", "capacity": "8 GiB", "allocated": "6.5 GiB"}\n'
    (pool,) = records(tmp_path / "some.jsonl", some)
    assert isinstance(pool, Pool) and pool.headroom_bytes == -(2**30)
    with pytest.raises(MmctlError, match="no out-of-memory message"):
        records(tmp_path / "none.jsonl", '{"tried": "much"}\n')


def test_mistakes_in_a_map_or_a_table_name_the_place(tmp_path: Path) -> None:
    for mapping, message in [
        ("temp=temperatur_c", "did you mean 'temperature_c'"), ("temp", "column=field"),
        ("temp=temperature_c*3 parsecs", "no number or unit"),
    ]:  # fmt: skip
        with pytest.raises(UsageError) as caught:
            parse_map(mapping)
        assert message in str(caught.value)
    for text, mapping, message in [
        ("a,b\n1,2\n", "ts=c,b=power_w", "no column 'c'"), ("a,b\n1,2\n", "b=power_w", "time?"),
        ("ts,b\n1,2\n", "", "no column bears"), ("ts,power_w\nx,2\n", "", "line 2: no time"),
        ("ts,power_w\n1\n", "", "line 2: 1 of 2 columns"),
    ]:  # fmt: skip
        with pytest.raises(MmctlError) as error:
            records(tmp_path / "x.csv", text, mapping)
        assert message in str(error.value)


def test_pressure_traces_are_known_by_their_content(tmp_path: Path) -> None:
    rows = "".join(f" {at / 10:4.1f} | 100 900 | 80 90 70 {min(at, 80)}\n" for at in range(100))
    found = records(tmp_path / "t.txt", "Time | MemAvail SwapFree | some avg10 full avg10\n" + rows)
    assert isinstance(found[50], Host) and found[50].memory_full_pressure_ratio == 0.5
    alarms = observe(found, PROFILE).alarms
    assert [alarm.rule for alarm in alarms] == ["host_pressure"]


def test_labels_of_every_form(tmp_path: Path) -> None:
    want = [(SECOND, 2 * SECOND)]
    for name, text in [
        ("a.json", json.dumps([[1, 2]])), ("b.json", json.dumps([{"start": 1, "end": 2}])),
        ("c.json", json.dumps({"real/x.csv": [["1970-01-01 00:00:01", "1970-01-01 00:00:02"]]})),
        ("d.csv", "start,end\n1,2\n"),
    ]:  # fmt: skip
        (tmp_path / name).write_text(text)
        assert read_labels(tmp_path / name, "x.csv") == want, name
    with pytest.raises(UsageError, match=r"did you mean 'x\.csv'"):
        read_labels(tmp_path / "c.json", "xx.csv")


def test_scores_against_labels_and_against_real_ooms() -> None:
    from mmctl.engine.breaker.evaluate import Alarm

    alarms = (
        Alarm("r", "d", 10 * SECOND, 12 * SECOND), Alarm("r", "d", 13 * SECOND, 14 * SECOND),
        Alarm("r", "d", 500 * SECOND, 501 * SECOND),
    )  # fmt: skip
    seen = Observed(alarms, (505 * SECOND,), 1001, 0, 1000 * SECOND)
    labelled = score(seen, [(8 * SECOND, 20 * SECOND), (700 * SECOND, 800 * SECOND)])
    assert (labelled.found, labelled.missed, labelled.alarms, labelled.false_alarms) == (1, 1, 2, 1)
    assert labelled.delay_p50_s == 2.0 and labelled.false_per_hour == pytest.approx(3.6)
    by_oom = score(seen, None)
    assert (by_oom.episodes, by_oom.found, by_oom.oom_lead_p50_s) == (1, 1, 5.0)
    assert wilson(0, 100) == pytest.approx((0.0, 0.0370), abs=1e-3)


@pytest.mark.parametrize(("rate", "distribution"), [(50, "lognormal"), (50, "mixed")])
def test_incidents_are_found_and_quiet_streams_are_left_alone(rate: int, distribution: str) -> None:
    quiet = evaluate_stream(PROFILE, rate, 1.0, 3, distribution, False)
    assert quiet.false_trips == 0
    noisy = evaluate_stream(PROFILE, rate, 1.0, 3, distribution, True)
    assert (noisy.found, noisy.missed, noisy.false_trips) == (10, 0, 0)
    assert noisy.delay_p50_s is not None and noisy.delay_p50_s <= 3.0


def test_the_shared_series_and_traces(data: Path) -> None:
    labels = data / "nab" / "combined_windows.json"
    found = false = samples = 0
    for name in ("ec2_request_latency_system_failure", "elb_request_count_8c0756",
                 "art_daily_small_noise"):  # fmt: skip
        path = data / "nab" / f"{name}.csv"
        table = open_foreign(str(path))
        assert table is not None
        result = score(observe(table, PROFILE), read_labels(labels, path.name), "series_outlier")
        assert result.missed == 0
        found += result.found
        false += result.false_alarms
        samples += result.samples
    assert found == 5 and 1000 * false / samples < 2.0  # 1.5 over all four series, by command
    for name, rules in (("overload", ["host_pressure"]), ("loadshift", [])):
        trace = open_foreign(str(data / "memory_pressure" / f"{name}.txt"))
        assert trace is not None
        assert [alarm.rule for alarm in observe(trace, PROFILE).alarms] == rules
    for path in sorted((data / "kernel_logs").iterdir()):
        log = open_foreign(str(path))
        assert log is not None
        tripped = bool(observe(log, PROFILE).alarms)
        assert tripped is (path.name[:3] not in ("k19", "k22", "k24")), path.name
    texts = open_foreign(str(data / "oom_messages.jsonl"))
    assert texts is not None
    assert len(observe(texts, PROFILE).alarms) == 3, "three of four show a shortfall"
