"""Shared fixtures: a clean home for every test, the folder of real inputs where there is one."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# A run in the background begins with SIGINT ignored, and so would every program under test.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(autouse=True)
def clean_home(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No test reads or writes the user's own configuration, cache or state."""
    home = tmp_path_factory.mktemp("home")
    for name in [name for name in os.environ if name.startswith("MMCTL_")]:
        if name != "MMCTL_TEST_DATA":
            monkeypatch.delenv(name)
    for variable, folder in (
        ("XDG_CONFIG_HOME", "config"), ("XDG_CACHE_HOME", "cache"), ("XDG_STATE_HOME", "state"),
        ("XDG_RUNTIME_DIR", "run"),
    ):  # fmt: skip
        (home / folder).mkdir(mode=0o700)
        monkeypatch.setenv(variable, str(home / folder))
    return home


@pytest.fixture(scope="session")
def data() -> Path:
    """The folder of real inputs (MMCTL_TEST_DATA, else beside the checkout)."""
    folder = Path(os.environ.get("MMCTL_TEST_DATA", ROOT.parent / "shared" / "data"))
    if not folder.is_dir():
        pytest.skip("the folder of real inputs is absent (MMCTL_TEST_DATA)")
    return folder


@pytest.fixture
def mmctl() -> Run:
    """Run the command line in a fresh process: ``mmctl("probe", "-o", "json")``."""

    def run(
        *arguments: str, timeout: float = 120, **more: object
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(  # type: ignore[call-overload,no-any-return]
            [sys.executable, "-m", "mmctl", *arguments],
            capture_output=True, text=True, timeout=timeout, **{"cwd": ROOT, **more},
        )  # fmt: skip

    return run


@pytest.fixture(scope="session")
def nvml_stub(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., dict[str, str]]:
    """Environment in which libnvidia-ml is the scriptable stand-in: ``nvml_stub("count=8")``.

    ``omit`` builds it without some symbols, as an old driver is.
    """
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler for the NVML stand-in")
    built: dict[tuple[str, ...], Path] = {}

    def environment(*settings: str, omit: tuple[str, ...] = (), **more: str) -> dict[str, str]:
        if omit not in built:
            folder = tmp_path_factory.mktemp("nvml")
            subprocess.run(
                [compiler, "-O1", "-fPIC", "-shared", "-Wl,-soname,libnvidia-ml.so.1",
                 *(f"-DOMIT_{name}" for name in omit), "-o", str(folder / "libnvidia-ml.so.1"),
                 str(ROOT / "tests" / "nvmlstub.c"), "-lpthread"],
                check=True, capture_output=True,
            )  # fmt: skip
            built[omit] = folder
        clean = {k: v for k, v in os.environ.items() if not k.startswith(("NVMLSTUB", "CUDA_"))}
        library = {"LD_LIBRARY_PATH": str(built[omit]), "NVMLSTUB_SET": ";".join(settings)}
        return {**clean, **library, **more}

    return environment
