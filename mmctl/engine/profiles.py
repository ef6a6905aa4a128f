"""TOML profiles: one typed Profile, every value with its provenance, all problems at once.

The shipped ``default`` profile is the only home of default values; the tables below name
each key, its unit and its limits. A profile extends another by name or path.
"""

import os
import re
from collections.abc import Iterable, Iterator
from itertools import takewhile
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import msgspec

from mmctl.engine import folders, layers
from mmctl.engine.errors import UsageError, suggestion
from mmctl.engine.layers import Origin, Problem

Bytes = Annotated[int, msgspec.Meta(ge=0, extra={"unit": "bytes"})]
Seconds = Annotated[float, msgspec.Meta(ge=0, extra={"unit": "seconds"})]
Ratio = Annotated[float, msgspec.Meta(ge=0, le=1, extra={"unit": "ratio"})]
PerSecond = Annotated[float, msgspec.Meta(ge=0, extra={"unit": "per_second"})]
Count = Annotated[int, msgspec.Meta(ge=0)]
Names = tuple[str, ...]
Mode = Literal["off", "observe", "enforce"]
MODES: tuple[Mode, ...] = get_args(Mode)
Theme = Literal["calm", "light", "contrast", "sixteen"]
THEMES: tuple[Theme, ...] = get_args(Theme)


class Table(msgspec.Struct, frozen=True, kw_only=True):
    """A table of a profile: each field is a key, its annotation the unit and limits."""


class Sources(Table, frozen=True):
    """What a command reads when no source is named, and how long it waits for one reading."""

    default: Names
    timeout_s: Seconds = msgspec.field(name="timeout")


class Sampling(Table, frozen=True):
    """How often sources are polled, and how late a record may come."""

    interval_s: Seconds = msgspec.field(name="interval")
    watermark_s: Seconds = msgspec.field(name="watermark")


class ModalityPatterns(Table, frozen=True):
    """Regular expressions for whole words that tell vision from text."""

    vision: Names
    text: Names


class Memory(Table, frozen=True):
    """What counts as usable and as a region, and the grid of the heatmap."""

    reference_bytes: Bytes = msgspec.field(name="reference")
    region_bytes: Bytes = msgspec.field(name="region")
    heat_rows: Count
    heat_window_s: Seconds = msgspec.field(name="heat_window")


class Rule(Table, frozen=True):
    """When a rule holds, for how long, and what is done then; expressions: ``mmctl-rules(5)``."""

    name: str
    when: str
    clear: str = ""
    hold_s: Seconds = msgspec.field(name="hold", default=0.0)
    min_samples: Count = 1
    max_age_s: Seconds = msgspec.field(name="max_age", default=5.0)
    respond: Names = ()
    mode: Literal["inherit", "observe"] = "inherit"
    quiet_in_recovery: bool = False


class Breaker(Table, frozen=True):
    """The state machine: its mode, deadlines, back-off and caps, and the rules."""

    mode: Mode
    inherit_rules: bool
    respond_deadline_s: Seconds = msgspec.field(name="respond_deadline")
    rebuild_deadline_s: Seconds = msgspec.field(name="rebuild_deadline")
    verify_deadline_s: Seconds = msgspec.field(name="verify_deadline")
    half_open_deadline_s: Seconds = msgspec.field(name="half_open_deadline")
    settle_s: Seconds = msgspec.field(name="settle")
    half_open_share: Ratio
    half_open_requests: Count
    half_open_verifications: Count
    backoff_s: Seconds = msgspec.field(name="backoff")
    backoff_max_s: Seconds = msgspec.field(name="backoff_max")
    max_failures: Count
    max_open_ratio: Ratio
    rules: tuple[Rule, ...]


class Actuators(Table, frozen=True):
    """Who carries commands out where there is no agent, and who is told of decisions."""

    engine: Literal["none", "vllm", "sglang"]
    url: str
    golden: str
    webhook: str
    alertmanager: str
    command: Names
    timeout_s: Seconds = msgspec.field(name="timeout")


class Responses(Table, frozen=True):
    """In which order memory is given back, and within which limits of quality."""

    order: Names
    host_reserve_bytes: Bytes = msgspec.field(name="host_reserve")
    keep_ratio: Annotated[float, msgspec.Meta(gt=0, le=1, extra={"unit": "ratio"})]
    max_tokens: Annotated[int, msgspec.Meta(ge=1)]
    quality_floor: Ratio
    entropy_limit: Annotated[float, msgspec.Meta(ge=0)]
    entropy_samples: Annotated[int, msgspec.Meta(ge=1)]
    entropy_rise: Annotated[float, msgspec.Meta(ge=0)]


class Recovery(Table, frozen=True):
    """What verification accepts; the floors are the published thresholds."""

    step_deadline_s: Seconds = msgspec.field(name="step_deadline")
    memory_tolerance_bytes: Bytes = msgspec.field(name="memory_tolerance")
    golden_runs: Annotated[int, msgspec.Meta(ge=5)]
    spread_factor: Annotated[float, msgspec.Meta(ge=1)]
    canary_margin: Annotated[float, msgspec.Meta(ge=0)]
    cosine_floor: Ratio
    bleu_floor: Annotated[float, msgspec.Meta(ge=0, le=100)]
    embedding_distance: Annotated[float, msgspec.Meta(ge=0, le=2)]


class Devices(Table, frozen=True):
    """The weights of the resource score."""

    temperature_low_c: float
    temperature_span_c: float
    temperature_weight: Ratio
    fragmentation_weight: Ratio
    bandwidth_weight: Ratio
    smoothing_s: Seconds = msgspec.field(name="smoothing")


class Links(Table, frozen=True):
    """How transfers are measured: runs, and the share trimmed at each end."""

    trim_ratio: Ratio
    runs: Count


class Schedule(Table, frozen=True):
    """The two queues, the service levels, and what a step costs beside its kernels."""

    vision_batch: Count
    vision_deadline_s: Seconds = msgspec.field(name="vision_deadline")
    stream_batch: Count
    stream_deadline_s: Seconds = msgspec.field(name="stream_deadline")
    ttft_slo_s: Seconds = msgspec.field(name="ttft_slo")
    itl_slo_s: Seconds = msgspec.field(name="itl_slo")
    slo_share: Ratio
    collective_limit_s: Seconds = msgspec.field(name="collective_limit")
    vision_use_floor: Ratio
    host_overhead_s: Seconds = msgspec.field(name="host_overhead")
    collective_s: Seconds = msgspec.field(name="collective")
    collective_bytes_per_s: PerSecond = msgspec.field(name="collective_bandwidth")
    links: str
    migration_deadline_s: Seconds = msgspec.field(name="migration_deadline")
    migration_patience_s: Seconds = msgspec.field(name="migration_patience")
    migration_l2_same_kind: Annotated[float, msgspec.Meta(ge=0)]
    migration_l2_across_kinds: Annotated[float, msgspec.Meta(ge=0)]


class Fingerprint(Table, frozen=True):
    """Bands of similarity, and what counts as a collision or as a late rank."""

    high_below: Count
    low_above: Count
    imbalance_s: Seconds = msgspec.field(name="imbalance")
    collision_ratio: Ratio = msgspec.field(name="collision")
    cache: str
    live_s: Seconds = msgspec.field(name="live")


class Family(Table, frozen=True):
    """How images become tokens in models whose name ``match`` is found in."""

    name: str
    match: str
    config: dict[str, Any]


class Guard(Table, frozen=True):
    """The gateway: limits, queues, and what it does to requests under pressure."""

    listen: str
    deadline_s: Seconds = msgspec.field(name="deadline")
    connect_s: Seconds = msgspec.field(name="connect")
    read_s: Seconds = msgspec.field(name="read")
    stall_s: Seconds = msgspec.field(name="stall")
    drain_s: Seconds = msgspec.field(name="drain")
    keepalive_s: Seconds = msgspec.field(name="keepalive")
    probe_s: Seconds = msgspec.field(name="probe")
    restart_s: Seconds = msgspec.field(name="restart")
    verify_s: Seconds = msgspec.field(name="verify")
    body_bytes: Bytes = msgspec.field(name="body")
    image_pixels: Annotated[int, msgspec.Meta(ge=1)]
    requests: Annotated[int, msgspec.Meta(ge=1)]
    images: Annotated[int, msgspec.Meta(ge=1)]
    queue: Count
    wait_s: Seconds = msgspec.field(name="wait")
    default_deadline_s: Seconds = msgspec.field(name="default_deadline")
    capacity_tokens: Count
    image_tokens: Annotated[int, msgspec.Meta(ge=1)]
    quality_floor: Annotated[float, msgspec.Meta(gt=0, le=1, extra={"unit": "ratio"})]
    least_side: Annotated[int, msgspec.Meta(ge=1)]
    output_tokens: Annotated[int, msgspec.Meta(ge=1)]
    admission_share: Ratio
    quarantine_s: Seconds = msgspec.field(name="quarantine")
    deaths: Annotated[int, msgspec.Meta(ge=1)]
    tenant_header: str
    golden: str
    rules: tuple[Rule, ...]
    families: tuple[Family, ...]


class Export(Table, frozen=True):
    """Where the exporter listens."""

    listen: str


class Screen(Table, frozen=True):
    """How the dashboard looks and which keys it takes."""

    theme: Theme
    ascii: bool
    keys: Names


class Profile(msgspec.Struct, frozen=True, kw_only=True):
    """A whole profile; field names are the tables of the TOML file."""

    sources: Sources
    sampling: Sampling
    modality: ModalityPatterns
    memory: Memory
    breaker: Breaker
    actuators: Actuators
    responses: Responses
    recovery: Recovery
    devices: Devices
    links: Links
    schedule: Schedule
    fingerprint: Fingerprint
    guard: Guard
    export: Export
    screen: Screen


class Loaded(msgspec.Struct, frozen=True):
    """A profile as loaded: typed values, what was written, and where each value came from."""

    name: str
    profile: Profile
    written: dict[str, Any]
    origins: dict[str, Origin]


class ProfileError(UsageError):
    """A profile with problems; ``problems`` holds every one of them."""

    def __init__(self, name: str, problems: list[Problem]) -> None:
        self.problems = problems
        super().__init__(
            f"profile '{name}' is not valid: {problems[0]}; all that is wrong with it: "
            f"mmctl profile validate {name}"
        )


def shipped_dir() -> Path:
    """The folder of shipped profiles: inside the installed package, or of the checkout."""
    package = Path(__file__).parents[1]
    installed = package / "profiles"
    return installed if installed.is_dir() else package.parent / "profiles"


def available() -> dict[str, Path]:
    """Every profile by name; a user's hides a shipped one of the same name, a plugin's none."""
    return _in_folders(_plugin_dirs()) | _named()


def about(path: Path) -> str:
    """What a profile's file says of itself: the first sentence of the comment it begins with."""
    lines = takewhile(lambda line: line.startswith("#"), path.read_text("utf-8").splitlines())
    comment = " ".join(line.lstrip("# ").strip() for line in lines)
    return re.split(r"(?<=[^.]\.) ", comment, maxsplit=1)[0]


def _named() -> dict[str, Path]:
    return _in_folders([shipped_dir(), folders.config() / "profiles"])


def _in_folders(folders: Iterable[Path]) -> dict[str, Path]:
    return {path.stem: path for folder in folders for path in sorted(folder.glob("*.toml"))}


def _plugin_dirs() -> Iterator[Path]:
    """The folders of packages that bring rules; the packages are found, not imported."""
    from importlib.util import find_spec

    from mmctl.engine import plugins

    for point in plugins.named("mmctl.rules").values():
        try:
            spec = find_spec(point.module)
        except ModuleNotFoundError:
            continue  # half uninstalled: its profiles are not there either
        for folder in (spec and spec.submodule_search_locations) or ():
            yield Path(folder)


def selected() -> tuple[str, str]:
    """The profile in force without a flag, and what chose it."""
    if name := os.environ.get("MMCTL_PROFILE"):
        return name, "environment MMCTL_PROFILE"
    active = folders.config() / "active"
    if active.is_file() and (name := active.read_text().strip()):
        return name, str(active)
    if Path("mmctl.toml").is_file():
        return "mmctl.toml", "project file"
    return "default", "shipped default"


def find(name: str) -> Path:
    """The file of a profile given by name or path; UsageError with a suggestion if none."""
    known = _named()
    if name not in known:
        known = available()
    if name in known:
        return known[name]
    path = Path(name)
    if path.suffix == ".toml" or "/" in name:
        if path.is_file():
            return path
        raise UsageError(f"no profile file at '{name}'")
    raise UsageError(
        f"unknown profile '{name}'{suggestion(name, known) or '; mmctl profile list shows all'}"
    )


def load(name: str | None = None) -> Loaded:
    """The profile ``name`` (or the selected one) with everything it extends.

    ``MMCTL_<TABLE>_<KEY>`` in the environment overrides single values. Raises ProfileError
    with every problem found.
    """
    if name is None:
        name, _ = selected()
    loaded, problems = check(name)
    if problems or loaded is None:
        raise ProfileError(name, problems)
    return loaded


def written(name: str) -> tuple[dict[str, Any], dict[str, Origin]]:
    """What ``name`` and all it extends set, as plain values, and where each is set."""
    values: dict[str, Any] = {}
    origins: dict[str, Origin] = {}
    for path in reversed(_chain(find(name))):
        layers.merge(values, origins, path)
    layers.apply_environment(values, origins)
    return values, origins


def check(name: str) -> tuple[Loaded | None, list[Problem]]:
    """Load ``name`` and collect all its problems instead of stopping at the first."""
    values, origins = written(name)
    profile, problems = layers.typed(Profile, values, origins, origins[""])
    return (Loaded(name, profile, values, origins) if profile else None), problems


def _chain(path: Path) -> list[Path]:
    """``path`` and what it extends, the root last; a profile that extends nothing but is not
    the root extends ``default``."""
    chain: list[Path] = []
    root = shipped_dir() / "default.toml"
    while True:
        if path in chain:
            raise UsageError(f"profile {chain[0]} extends itself by way of {path}")
        chain.append(path)
        if path == root:
            return chain
        base = layers.read(path).get("extends", "default")
        if not isinstance(base, str):
            raise UsageError(f"{path}: extends must be the name or path of a profile")
        near = path.parent / base
        path = near if base.endswith(".toml") and near.is_file() else find(base)


def leaves(written: dict[str, Any], where: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted key and value of everything written, entries of a list of tables by their name."""
    for key, value in written.items():
        path = f"{where}.{key}" if where else key
        if isinstance(value, dict):
            yield from leaves(value, path)
        elif isinstance(value, list) and value and isinstance(value[0], dict):
            for entry in value:
                yield from leaves(
                    {k: v for k, v in entry.items() if k != "name"}, f"{path}.{entry.get('name')}"
                )
        else:
            yield path, value
