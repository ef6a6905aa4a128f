"""A real server of another project: ``transformers serve`` with a tiny LLaVA-NeXT.

Takes minutes: run with MMCTL_TEST_SERVE set to the script that makes the model.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

SCRIPT = os.environ.get("MMCTL_TEST_SERVE", "")
pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.skipif(not SCRIPT, reason="takes minutes: set MMCTL_TEST_SERVE to its script"),
    pytest.mark.skipif(not shutil.which("transformers"), reason="needs transformers[serving]"),
]


@pytest.fixture
def serve() -> Iterator[Callable[[Path], str]]:
    servers = []

    def start(model: Path) -> str:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        servers.append(
            subprocess.Popen(
                ["transformers", "serve", str(model), "--device", "cpu", "--port", str(port)],
                stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
        )  # fmt: skip
        while True:
            assert servers[-1].poll() is None
            with socket.socket() as probe:
                if probe.connect_ex(("localhost", port)) == 0:
                    return f"http://localhost:{port}"
            time.sleep(0.5)

    yield start
    for server in servers:
        server.kill()
        server.wait()


def test_a_restart_is_consistent_and_a_zeroed_head_is_not(serve, mmctl, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    model, golden = tmp_path / "model", tmp_path / "golden.json"
    subprocess.run([sys.executable, SCRIPT, str(model)], check=True, capture_output=True)

    def verify(url: str):
        return mmctl("breaker", "verify", "--golden", str(golden), "--endpoint", url, timeout=400)

    assert verify(serve(model)).returncode == 0
    restarted = verify(serve(model))
    assert restarted.returncode == 0 and "consistent: 0 of" in restarted.stdout
    weights = load_file(model / "model.safetensors")
    (name,) = [n for n in weights if "language_model" in n and "1.self_attn.o_proj" in n]
    weights[name][:, 16:32] = 0
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    damaged = verify(serve(model))
    assert damaged.returncode == 3 and "inconsistent" in damaged.stdout
