"""The simulation's loop through numba's compiler (the extra ``fast``), for long traces."""

from __future__ import annotations

import subprocess
import sys
from functools import cache
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

from mmctl.engine import compiling

# Compiling takes half a minute of CPU once per version; loading what was compiled one second.
WORTH_REQUESTS, WORTH_COMPILING = 10_000, 100_000


def worth(requests: int) -> bool:
    """Whether a run of so many requests is done sooner by the compiled loop."""
    if not compiling.available():
        return False
    return requests >= (
        WORTH_REQUESTS if compiling.kept(_folder(), "loop.run") else WORTH_COMPILING
    )


_KERNEL = Path(__file__).parent / "kernel"


@cache
def _folder() -> Path:
    return compiling.folder((*_KERNEL.glob("*.py"), _KERNEL.parent / "layout.py"))


@cache
def load() -> Any:
    """The loop's module, compiled on first use, and then taken from the cache folder.

    Compiling is left to a child: its memory is twice that of a long run, and goes with it.
    """
    if not compiling.kept(_folder(), "loop.run"):
        code = "from mmctl.engine.schedule import compiled; compiled.compile_all()"
        subprocess.run([sys.executable, "-c", code], stdin=subprocess.DEVNULL, check=False,
                       capture_output=True)  # fmt: skip
    return _loop()


def compile_all() -> None:
    """Compile every function of the loop into the cache folder, by running it once."""
    from mmctl.engine.schedule import fleet, generate, policies, simulate

    model, engine = fleet.model(fleet.USUAL_MODEL), fleet.Engine()
    work = generate.from_quantiles(rate_per_s=1.0, count=3, seed=1)
    rule = policies.rule(policies.POLICIES["perception"], output_mean=1.0, seed=1)
    devices = fleet.parse("h100_sxm", model, engine)
    simulate.run(work, devices, rule, model, engine, plain=False, loop=_loop())


@cache
def _loop() -> Any:
    """The package ``kernel`` a second time, under another name and with numba's ``jit`` in it
    before its modules are read."""
    name = "mmctl.engine.schedule.compiled_kernel"
    spec = spec_from_file_location(
        name, _KERNEL / "__init__.py", submodule_search_locations=[str(_KERNEL)]
    )
    assert spec is not None and spec.loader is not None
    package = module_from_spec(spec)
    sys.modules[name] = package
    with compiling.into(_folder()) as numba:
        package.__dict__["jit"] = numba.njit(cache=True, nogil=True)
        spec.loader.exec_module(package)
        return import_module(f"{name}.loop")
