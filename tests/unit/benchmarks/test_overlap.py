"""Overlap of a gather with the encoder: the arithmetic, the paced sockets, the processes."""

from __future__ import annotations

import socket
import sys
import threading
import time

import pytest

from mmctl.benchmarks import overlap, pacing, processes
from mmctl.benchmarks.overlap import Spell
from mmctl.engine.errors import MmctlError


def test_waiting_that_is_gone_is_told_beside_it() -> None:
    given = rounds(1.0, 0.5, 1.5, 1.1)
    given["blocking"] = [Spell(1.5, 0.1, 0.5)] * 5
    given["overlapped"] = [Spell(1.1, 0.1, 0.1)] * 5
    row = overlap._row(2, "throttled", 1000, 5, 1, True, given)
    assert row.unwaited_ratio == pytest.approx(0.8) and row.waited_ms == pytest.approx(100)


def rounds(compute: float, gather: float, blocking: float, overlapped: float, cpu: float = 0.1):
    given = {"compute": compute, "gather": gather, "blocking": blocking, "overlapped": overlapped}
    return {name: [Spell(wall, cpu * wall, 0.0)] * 5 for name, wall in given.items()}


def test_hidden_is_saved_time_over_what_gathering_costs() -> None:
    row = overlap._row(2, "throttled", 1000, 5, 1, True, rounds(1.0, 0.5, 1.5, 1.1))
    assert row.hidden_ratio == pytest.approx(0.8) and row.largest_hidden_ratio == 0.8
    assert row.saved_ratio == pytest.approx(0.4 / 1.5)
    assert row.gather_ms == pytest.approx(100)
    assert row.bandwidth_bytes_per_s == pytest.approx(1000 / 0.1)
    assert row.bottleneck == "link"
    busy = overlap._row(2, "throttled", 1000, 5, 1, True, rounds(1.0, 0.5, 1.5, 1.1, cpu=0.9))
    assert busy.bottleneck == "cpu"
    # What the copying takes from the encoder counts: here nothing is hidden, all is only moved.
    assert overlap._row(2, "loopback", 1, 5, 1, True, rounds(1, 0.5, 1.5, 1.5)).hidden_ratio == 0


def test_what_cannot_be_told_from_noise_is_absent() -> None:
    row = overlap._row(2, "loopback", 1000, 5, 1, True, rounds(1.0, 0.01, 1.01, 1.0))
    assert row.hidden_ratio is None and row.hidden_ci is None
    assert "noise" in row.absent["hidden_ratio"]


@pytest.mark.skipif(sys.platform != "linux", reason="pacing is Linux's")
def test_a_paced_socket_takes_its_time() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    sender = socket.create_connection(listener.getsockname())
    receiver, _ = listener.accept()

    def took(size: int) -> float:
        thread = threading.Thread(target=sender.sendall, args=(bytes(size),))
        began = time.perf_counter()
        thread.start()
        left = size
        while left:
            left -= len(receiver.recv(min(left, 65536)))
        thread.join()
        return time.perf_counter() - began

    try:
        took(2**20)
        numbers = {sender.fileno(), listener.fileno()}
        assert pacing.pace(numbers, 2**22) == 1  # a socket that listens is no connection
        assert {sender.fileno(), receiver.fileno()} <= pacing.sockets()
        slow = took(2**21)
        assert slow > 0.25  # 2 MiB at 4 MiB/s take half a second
        pacing.pace(numbers, None)
        took(2**20)
        assert took(2**21) < slow
    finally:
        for one in (listener, sender, receiver):
            one.close()


def _squared(rank: int, tell, number: int) -> int:
    tell("half", 0.5)
    return (rank + number) ** 2


def _fails(rank: int, tell) -> None:
    if rank:
        raise ValueError("no such thing\nand more")
    time.sleep(60)


def _vanishes(rank: int, tell) -> None:
    import os

    os._exit(3)


def test_processes_give_results_by_rank_and_end_with_the_first_failure() -> None:
    told = []
    results = processes.run(_squared, 2, (3,), lambda name, share: told.append((name, share)))
    assert results == [9, 16] and told == [("half", 0.5)]
    began = time.monotonic()
    with pytest.raises(MmctlError, match=r"process 1 .*ValueError: no such thing$"):
        processes.run(_fails, 2, ())
    with pytest.raises(MmctlError, match="ended before"):
        processes.run(_vanishes, 1, ())
    assert time.monotonic() - began < 50
    with pytest.raises(MmctlError, match="not done after"):
        processes.run(_fails, 1, (), deadline_s=2)
