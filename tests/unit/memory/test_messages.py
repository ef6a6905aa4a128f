"""Out-of-memory texts of every wording, and the one cause that their figures prove."""

from __future__ import annotations

import pytest

from mmctl.engine.memory.causes import cause
from mmctl.engine.memory.messages import find
from mmctl.engine.memory.ooms import from_message

MIB, GIB = 1 << 20, 1 << 30
NOW = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate {need}. GPU 0 has a total "
    "capacity of 23.65 GiB of which {free} is free. {others}Including non-PyTorch memory, this "
    "process has {own} memory in use. Of the allocated memory {held} is allocated by PyTorch, with "
    "60.00 MiB allocated in private pools (e.g., CUDA Graphs), and {rest} is reserved by PyTorch "
    "but unallocated. If reserved but unallocated memory is large try setting"
)
THEN = (
    "RuntimeError: CUDA out of memory. Tried to allocate 20.00 MiB (GPU 1; 7.79 GiB total "
    "capacity; 5.61 GiB already allocated; 9.69 MiB free; 5.62 GiB reserved in total by PyTorch) "
    "If reserved memory is >> allocated memory try setting max_split_size_mb"
)


@pytest.mark.parametrize(
    ("need", "free", "others", "own", "held", "rest", "expected"),
    [
        ("48.00 MiB", "43.00 MiB", "", "23.60 GiB", "22.20 GiB", "371.00 MiB", "false_free"),
        ("232.00 MiB", "154.25 MiB", "", "23.40 GiB", "22.88 GiB", "188.29 MiB", "split_free"),
        ("4.00 GiB", "1.00 GiB", "", "22.60 GiB", "22.00 GiB", "100.00 MiB", "capacity"),
        ("2.00 GiB", "1.00 GiB", "Process 9 has 9.00 GiB memory in use. ", "13.60 GiB",
         "13.00 GiB", "100.00 MiB", "other_process"),
        ("1.00 GiB", "1.50 GiB", "", "22.10 GiB", "22.00 GiB", "10.00 MiB", "unexplained"),
    ],
)  # fmt: skip
def test_causes_of_todays_wording(
    need: str, free: str, others: str, own: str, held: str, rest: str, expected: str
) -> None:
    text = NOW.format(need=need, free=free, others=others, own=own, held=held, rest=rest)
    (message,) = find(f"INFO step 9\n{text}\nINFO next")
    assert message.line == 2
    assert message.private_bytes == 60 * MIB
    assert cause(message.figures()) == expected
    assert from_message(message).cause == expected


def test_the_wording_until_torch_2_0() -> None:
    (message,) = find(THEN)
    assert (message.device, message.need_bytes) == (1, 20 * MIB)
    assert message.capacity_bytes == round(7.79 * GIB)
    assert message.unallocated_bytes == pytest.approx(0.01 * GIB, abs=1)
    assert message.other_bytes is None  # it lists no processes, and does not tell its own
    assert cause(message.figures()) == "capacity"


def test_own_memory_outside_torch_is_named() -> None:
    text = NOW.format(
        need="4.00 GiB", free="43.00 MiB", others="", own="23.60 GiB", held="21.60 GiB",
        rest="0 bytes",
    )  # fmt: skip
    (message,) = find(text)
    assert message.non_torch_bytes == 2 * GIB
    told = from_message(message)
    assert told.cause == "capacity"
    assert "2.0 GiB of this process outside torch" in told.explanation


def test_a_message_over_several_lines_and_several_messages() -> None:
    text = NOW.format(
        need="48.00 MiB", free="43.00 MiB", others="", own="23.60 GiB", held="22.20 GiB",
        rest="371.00 MiB",
    ).replace(". ", ".\n  ")  # fmt: skip
    found = find(text + "\n" + THEN)
    assert [message.need_bytes for message in found] == [48 * MIB, 20 * MIB]
    assert found[0].unallocated_bytes == 371 * MIB


def test_what_the_message_leaves_out_is_unknown() -> None:
    (message,) = find("XPU out of memory. Tried to allocate 2.00 GiB. GPU 0 has trouble.")
    told = from_message(message)
    assert told.cause == "unknown"
    assert told.short_bytes is None
    assert set(told.absent) >= {"free_bytes", "device_free_bytes", "largest_free_bytes"}
