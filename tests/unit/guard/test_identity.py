"""Which answers tell that another process gives them."""

from __future__ import annotations

import pytest

from mmctl.guard.backends import Listing
from mmctl.guard.identity import Identity

Told = list[tuple[float, float]]  # when it was asked, what it said


@pytest.mark.parametrize(
    ("told", "replaced"),
    [
        ([(0, 100), (5, 100), (10, 107)], True),
        ([(0, 100), (5, 105), (10, 110)], False),  # the time of the answer, as vLLM has it
        ([(0, 100), (0.2, 100), (0.4, 101), (0.6, 101)], False),  # the same, asked often
        ([(0, 100), (5, 100), (10, 100)], False),
    ],
)
def test_created_of_a_model(told: Told, replaced: bool) -> None:
    identity = Identity()
    said = [identity.listed(Listing(("m",), created), at_s) for at_s, created in told]
    assert (True in said) is replaced


@pytest.mark.parametrize(
    ("told", "replaced"),
    [
        ([(0, 100), (10, 100), (20, 112)], True),
        ([(0, 100), (60, 100), (70, 101.5), (80, 100), (90, 101.5)], False),  # two workers
        ([(0, 101.5), (60, 100), (70, 101.5)], False),
        ([(0, 100), (10, 100), (20, 100)], False),
    ],
)
def test_start_of_a_process(told: Told, replaced: bool) -> None:
    identity = Identity()
    page = "# TYPE process_start_time_seconds gauge\nprocess_start_time_seconds {}\nother 7\n"
    said = [identity.page(page.format(s).encode(), at) for at, s in told]
    assert (True in said) is replaced


def test_what_tells_nothing() -> None:
    identity = Identity()
    assert not any(
        identity.listed(Listing(), at_s) or identity.page(b"", at_s) for at_s in range(9)
    )


def test_another_model_in_the_list_is_no_other_process() -> None:
    identity = Identity()
    told = [(("old",), 100.0), (("old",), 100.0), (("new", "old"), 300.0), (("old",), 100.0)]
    for number, (models, created) in enumerate(told):
        assert not identity.listed(Listing(models, created), 10.0 * number)
