"""A reader of a replaced file sees the old content or the new, whatever goes wrong."""

from __future__ import annotations

import os
import stat
import subprocess
import sys

import pytest

from mmctl.engine import atomic
from mmctl.engine.errors import MmctlError


def test_content_replaces_what_was_there(tmp_path):
    path = tmp_path / "out.json"
    atomic.write(path, b"old")
    atomic.write(path, "né")
    assert path.read_bytes() == "né".encode()
    assert os.listdir(tmp_path) == ["out.json"]


def test_an_exception_leaves_the_old_file_and_nothing_beside_it(tmp_path):
    path = tmp_path / "out.json"
    atomic.write(path, b"old")
    with pytest.raises(KeyboardInterrupt), atomic.replacing(path) as file:
        file.write(b"half")
        raise KeyboardInterrupt
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["out.json"]


def test_the_umask_decides_who_reads_it_and_private_is_the_owner_alone(tmp_path):
    before = os.umask(0o027)
    try:
        atomic.write(tmp_path / "shared", b"")
        atomic.write(tmp_path / "own", b"", private=True)
    finally:
        os.umask(before)
    modes = [stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("shared", "own")]
    assert modes == [0o640, 0o600]


def test_a_link_stays_a_link(tmp_path):
    (tmp_path / "real").write_bytes(b"old")
    (tmp_path / "link").symlink_to("real")
    atomic.write(tmp_path / "link", b"new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real").read_bytes() == b"new"


def test_a_device_is_written_and_not_replaced():
    program = (
        "from pathlib import Path; from mmctl.engine import atomic;"
        "atomic.write(Path('/dev/stdout'), 'through'); atomic.write(Path('/dev/null'), 'x')"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("through", "")
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)


@pytest.mark.parametrize("name", ["no/such/folder/file", "folder"])
def test_what_cannot_be_written_is_one_line_that_names_it(tmp_path, name):
    (tmp_path / "folder").mkdir()
    with pytest.raises(MmctlError, match=f"cannot write .*{name}: "):
        atomic.write(tmp_path / name, b"x")
