"""The expression language: units, whitelist, suggestions."""

from __future__ import annotations

import re

import pytest

from mmctl.engine.errors import UsageError
from mmctl.engine.rules import language


def constant(text: str) -> float:
    """The plain number that a quantity becomes beside a signal."""
    node = language.parse(f"temperature_c > {text}")
    assert isinstance(node, language.Compare) and isinstance(node.right, language.Constant)
    assert isinstance(node.right.value, float)
    return node.right.value


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("16MiB", 2**24), ("1.5 GB", 1.5e9), ("100ms", 0.1), ("5min", 300.0), ("85%", 0.85),
        ("5/min", 5 / 60), ("256KiB/s", 2**18), ("92 %", 0.92), ("7", 7.0), ("2e3", 2000.0),
    ],
)  # fmt: skip
def test_quantities_become_plain_numbers(text: str, number: float) -> None:
    assert constant(text) == pytest.approx(number)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("temprature_c > 80", "did you mean 'temperature_c'"),
        ("p98(ttft_p99_s, 10s) > 1", "did you mean 'p9"),
        ("__import__('os').system('true')", "unknown function"),
        ("(lambda: 1)()", "unknown function"),
        ("[x for x in (1,)]", "not allowed"),
        ("temperature_c.__class__", "unknown signal"),
        ("temperature_c if power_w else 1", "not allowed"),
        ("temperature_c ** 9", "only + - * /"),
        ("temperature_c >", "cannot read"),
        ("mean(temperature_c)", "takes an expression, a window"),
        ("mean(temperature_c, 0s)", "longer than 0"),
        ("mean(temperature_c, 2.5)", "a window is a time"),
        ("mean(3, 10s)", "needs a signal"),
        ("temperature_c is None", "is not allowed"),
        ("min(temperature_c, 5s, 3)", "a time such as 10s"),
        ("(" * 400 + "temperature_c" + ")" * 400, "cannot read"),
        ("temperature_c > 1" + " and power_w > 1" * 200, "characters"),
    ],
)
def test_what_is_not_on_the_whitelist_is_refused(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=r"^[^\n]*$") as caught:
        language.parse(text)
    assert message in str(caught.value)


def test_windows_of_time_and_of_samples() -> None:
    node = language.parse("min(attention_entropy, 3) > mean(attention_entropy, 10min, 30s)")
    assert isinstance(node, language.Compare)
    left, right = node.left, node.right
    assert isinstance(left, language.Window) and isinstance(right, language.Window)
    assert (left.samples, left.seconds) == (3, None)
    assert (right.samples, right.seconds, right.lag_s) == (None, 600.0, 30.0)


def test_strings_keep_their_content() -> None:
    node = language.parse('"10s slow" in throttle')
    assert isinstance(node, language.Compare) and isinstance(node.left, language.Constant)
    assert node.left.value == "10s slow"


def test_the_help_of_rules_names_every_function() -> None:
    from mmctl.cli.breaker.rules import rules

    words = set(re.findall(r"\w+", rules.__doc__ or ""))
    assert words >= {*language.WINDOWS, *language.FUNCTIONS, "time_to"}
