"""Install what would be published, on the oldest and the newest Python of this machine, and use it.

``python tests/installs.py`` makes an sdist of the checkout, a wheel of the sdist, and a clean
environment for each interpreter; then it runs what a newcomer types first. Needs a package index.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
OLDEST, NEWEST = 10, 13
VERSION = "import sys; print(sys.version_info[1], sys.executable)"


def interpreters() -> dict[int, str]:
    """Minor version → executable, of every supported Python 3 on the path or under pyenv."""
    named = [f"python3.{minor}" for minor in range(OLDEST, NEWEST + 1)]
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv") / "versions"
    found = {}
    for command in [sys.executable, *named, *map(str, pyenv.glob("3.*/bin/python3"))]:
        try:
            done = subprocess.run([command, "-c", VERSION], capture_output=True, text=True)
        except FileNotFoundError:
            continue
        if done.returncode == 0:
            minor, executable = done.stdout.split(maxsplit=1)
            if OLDEST <= int(minor) <= NEWEST:
                found.setdefault(int(minor), executable.strip())
    return found


def build(folder: Path) -> tuple[Path, Path]:
    """The sdist of the checkout and the wheel that its content alone makes."""
    hatchling = [sys.executable, "-m", "hatchling", "build", "-d", str(folder)]
    subprocess.run([*hatchling, "-t", "sdist"], cwd=ROOT, check=True, capture_output=True)
    (sdist,) = folder.glob("mmctl-*.tar.gz")
    with tarfile.open(sdist) as archive:
        archive.extractall(folder)
    source = folder / sdist.name.removesuffix(".tar.gz")
    subprocess.run([*hatchling, "-t", "wheel"], cwd=source, check=True, capture_output=True)
    (wheel,) = folder.glob("mmctl-*.whl")
    return sdist, wheel


def use(prefix: Path) -> Iterator[str]:
    """Run the first commands of a newcomer; one line about each that did what it should."""
    environment = {
        "PATH": f"{prefix / 'bin'}:{os.environ['PATH']}", "HOME": str(prefix), "LANG": "C.UTF-8",
        "MANPATH": str(prefix / "share" / "man"),
    }  # fmt: skip

    def run(*command: str) -> str:
        return subprocess.run(
            command, cwd=prefix, env=environment, check=True, capture_output=True, text=True
        ).stdout

    yield run("mmctl", "--version").strip()
    names = [
        one["name"] for one in json.loads(run("mmctl", "profile", "list", "-o", "json"))["profiles"]
    ]
    assert {"default", "paper"} <= set(names), names
    yield f"profiles {', '.join(names)}"
    devices = json.loads(run("mmctl", "probe", "-q", "-o", "json"))["devices"]
    yield f"probe: {devices[0]['device']}"
    picture = run("mmctl", "top", "demo", "--once", "-o", "text")
    assert "Devices" in picture
    yield f"top demo --once: {len(picture.splitlines())} lines"
    page = run("man", "-w", "mmctl").strip()
    for values in ("mmctl-records", "mmctl.toml", "mmctl-rules"):
        run("man", "-w", values)
    assert page.startswith(str(prefix)), page
    yield f"man mmctl: {page.removeprefix(str(prefix))}"


def main() -> None:
    found = interpreters()
    with tempfile.TemporaryDirectory(prefix="mmctl-") as name:
        folder = Path(name)
        sdist, wheel = build(folder)
        for minor, package in {min(found): sdist, max(found): wheel}.items():
            prefix = folder / f"3.{minor}"
            subprocess.run([found[minor], "-m", "venv", prefix], check=True)
            pip = [str(prefix / "bin" / "pip"), "install", "-q", "--disable-pip-version-check"]
            subprocess.run([*pip, str(package)], check=True)
            for line in use(prefix):
                print(f"Python 3.{minor}, {package.name}: {line}", flush=True)


if __name__ == "__main__":
    main()
