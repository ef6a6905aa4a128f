"""What can be done to a session at rest, and what the dry run is told of it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from mmctl.demo import choose  # noqa: E402
from mmctl.demo.scenarios import Arrival  # noqa: E402
from mmctl.demo.server import Session  # noqa: E402
from mmctl.engine.model import Config, KvCache  # noqa: E402
from mmctl.engine.responses.distill import distill_pair  # noqa: E402
from mmctl.engine.responses.quantize import quantize  # noqa: E402


def session_at_rest() -> Session:
    session = Session(0, Arrival((224,), 32, 4), 0, 0)
    cache = KvCache(Config(), "cpu")
    for layer in range(cache.config.text_layers):
        cache.append(layer, torch.zeros(8, 256), torch.zeros(8, 256))
    session.cache = cache
    session.vision = [torch.randn(2, session.vision_tokens, 256).half() for _ in range(4)]
    return session


def test_pieces_say_what_they_free_and_nothing_is_done_twice() -> None:
    session = session_at_rest()
    by_name = {piece.response: piece for piece in choose.pieces_of([session])}
    assert set(by_name) == {"offload_kv", "distill", "quantize_vision"}
    assert by_name["offload_kv"].frees_bytes == 8 * 512 * 256 * 4
    size = 4 * 2 * session.vision_tokens * 256 * 2
    for response, change in (("distill", lambda t: distill_pair(t).tokens),
                             ("quantize_vision", lambda t: quantize(t))):  # fmt: skip
        kept = [change(tensor) for tensor in session.vision]
        after = sum(k.nbytes if not isinstance(k, torch.Tensor) else k.numel() * 2 for k in kept)
        assert by_name[response].frees_bytes == pytest.approx(size - after, rel=0.03)
    session.vision = [distill_pair(tensor).tokens for tensor in session.vision]
    assert [piece.response for piece in choose.pieces_of([session])] == ["offload_kv"]


def test_the_dry_run_frees_each_block_once() -> None:
    session = session_at_rest()
    tensors = [*session.cache.keys, *session.cache.values, *session.vision]
    addresses = {t.untyped_storage()._cdata: 1000 + i for i, t in enumerate(tensors)}
    worker = SimpleNamespace(pool=SimpleNamespace(addresses=addresses))
    for piece in choose.pieces_of([session]):
        steps = choose._steps(worker, piece, {session.id: session})
        freed = [address for step in steps for address in step.frees_addresses]
        assert len(freed) == len(set(freed)) == (8 if piece.response == "offload_kv" else 4)
        taken = sum(step.size_bytes for step in steps)
        assert (taken == 0) == (piece.response == "offload_kv")
