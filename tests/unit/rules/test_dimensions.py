"""Expressions compare like with like; all that is shipped does."""

from __future__ import annotations

import pytest

from mmctl.engine import profiles
from mmctl.engine.errors import UsageError
from mmctl.engine.rules import dimensions, language


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("fragmentation_ratio > 3MiB", "'fragmentation_ratio' is a ratio, '3MiB' in bytes"),
        ("temperature_c > 16MiB", "'temperature_c' is in °C, '16MiB' in bytes"),
        ("used_bytes > 85%", "'used_bytes' is in bytes, '85%' a ratio"),
        ("temperature_c > 5s", "'temperature_c' is in °C, '5s' a time"),
        ("fragmentation_ratio > 65", "never holds"),
        ("fragmentation_ratio > 65", "did you mean 65%?"),
        ("kv_ratio <= 100%", "'kv_ratio <= 100%' always holds"),
        ("-1 < p95(kv_ratio, 10s)", "always holds"),
        ("max(sm_ratio, 10s) == 2", "never holds"),
        ("slope(used_bytes, 10s) > 5MiB", "'slope(used_bytes, 10s)' is in bytes/s, '5MiB' in"),
        ("time_to(total_bytes, used_bytes) < 5MiB", "is a time, '5MiB' in bytes"),
        ("time_to(total_bytes, kv_ratio) < 5s", "'total_bytes' is in bytes, 'kv_ratio' a ratio"),
        ("sm_ratio * used_bytes > 3s", "'sm_ratio * used_bytes' is in bytes, '3s' a time"),
        ("3 * temperature_c > 5s", "'3 * temperature_c' is in °C, '5s' a time"),
        ("used_bytes + 5s > 3", "'used_bytes' is in bytes, '5s' a time"),
        ("kv_ratio > 5/min", "'kv_ratio' is a ratio, '5/min' a rate per second"),
        ("used_bytes / power_w > 5s", "is in bytes·s/J, '5s' a time"),
        ("power_w > 16MiB", "'power_w' is in watts, '16MiB' in bytes"),
        ("took_ns > 5s", "'took_ns' is in nanoseconds, '5s' a time"),
        ("vision_tokens > 85%", "'vision_tokens' is in tokens, '85%' a ratio"),
        ("kind == 5", "'kind' is a text, '5' a number"),
        ('throttle == "hw_slowdown"', "is a list of texts, '\"hw_slowdown\"' a text"),
        ('"hot" in temperature_c', "'temperature_c' is no list of texts"),
        ("5 in throttle", "'5' is no text"),
        ("mean(kind, 3s) > 2", "'kind' is a text, and mean is of numbers"),
        ("temperature_c", "'temperature_c' is a number, no condition"),
        ("kv_ratio > 0 and not temperature_c", "'temperature_c' is a number, no condition"),
        ("throttle", "'throttle' is a list of texts, no condition"),
    ],
)
def test_what_differs_is_said_with_both_units(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=r"^[^\n]*$") as caught:
        dimensions.check(language.parse(text))
    assert message in str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        "temperature_c > 92", "used_bytes > 1e9", "value > 5s", "value > 16MiB", "waiting > 85%",
        "fits", "not fits", "fits == true", "min(fits, 3)", "known(power_w)",
        "kv_ratio < 1", "kv_ratio == 0", "0 < kv_ratio < 50%", "delta(kv_ratio, 10s) > 1.5",
        "1 - host.available_bytes / host.total_bytes > 85%", "slope(kv_ratio, 30s) > 10%/min",
        "rate(energy_j, 10s) > 0.9 * power_limit_w", "power_w * 10s > 5", "1 / ttft_p99_s > 5/s",
        "generation_tokens_per_s > 100/s", "rate(vision_tokens, 10s) > 500/s",
        "vision_tokens / text_tokens > 80%", "5/min * 10s < vision_tokens",
        "used_bytes / vision_tokens > 16KiB",
        "log(ttft_p99_s) - log(ttft_p50_s) > 0.4", "sqrt(used_bytes) > 5",
        "count(kind == 'npu', 10s) > 2", '"hot" in throttle', "sm_clock_hz > 1000/s",
        "at_least(6 * std(power_w, 10s), 2) > power_limit_w",
    ],
)  # fmt: skip
def test_what_can_be_compared_may_be(text: str) -> None:
    dimensions.check(language.parse(text))


def test_numbers_read_as_they_were_written() -> None:
    node = language.parse("1.5 GB * 2 > used_bytes + 30% * total_bytes")
    assert isinstance(node, language.Compare)
    assert (node.left.text, node.right.text) == ("1.5 GB * 2", "used_bytes + 30% * total_bytes")


@pytest.mark.parametrize(
    "name", sorted(path.stem for path in profiles.shipped_dir().glob("*.toml"))
)
def test_every_shipped_rule_compares_like_with_like(name: str) -> None:
    profile = profiles.load(name).profile
    for rule in (*profile.breaker.rules, *profile.guard.rules):
        for text in filter(None, (rule.when, rule.clear)):
            dimensions.check(language.parse(text))
