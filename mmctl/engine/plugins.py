"""What other packages add, by entry point: sources, rules, responses, policies.

| group             | an entry point names                                                   |
|-------------------|------------------------------------------------------------------------|
| `mmctl.sources`   | ``source(rest, profile, stop) -> Iterator[AnyRecord]``, a URI's scheme |
| `mmctl.rules`     | a package whose folder holds TOML profiles                             |
| `mmctl.responses` | ``function(tokens [..., N, C]) -> tokens`` in fewer bytes              |
| `mmctl.policies`  | a ``schedule.policies.Policy``                                         |

Each room asks for its own group when a name is not one of its own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mmctl.engine.errors import MmctlError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint


def named(group: str) -> dict[str, EntryPoint]:
    """The entry points of ``group`` by name; nothing of them is imported."""
    from importlib.metadata import entry_points

    return {point.name: point for point in entry_points(group=group)}


def load(point: EntryPoint) -> Any:
    """What ``point`` names; MmctlError, with the package's own words, when it cannot be had."""
    try:
        return point.load()
    except Exception as error:  # a stranger's module: whatever it raises is its failure
        package = point.dist.name if point.dist else point.value
        raise MmctlError(
            f"the plugin '{point.name}' of {package} cannot be loaded: "
            f"{type(error).__name__}: {error}"
        ) from error
