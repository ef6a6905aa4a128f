"""The device benchmark: no figure without a kernel of its own, energy that is counted."""

from __future__ import annotations

from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="needs the extra 'torch'")

from mmctl.benchmarks import energy, products, rounds, stages  # noqa: E402
from mmctl.engine.devices.table import PRECISIONS  # noqa: E402
from mmctl.engine.errors import MmctlError  # noqa: E402

CPU = products.Target("cpu0", "x", "cpu")


@pytest.mark.parametrize(
    ("flags", "missing"),
    [
        ({"avx2": True}, {"bf16", "fp16", "int8"}), ({"avx512_bf16": True}, {"fp16", "int8"}),
        ({"amx_bf16": True, "amx_fp16": True, "amx_int8": True}, set()),
        ({"avx512_vnni": True}, {"bf16", "fp16"}),
    ],
)  # fmt: skip
def test_a_conversion_is_never_timed(
    monkeypatch: pytest.MonkeyPatch, flags: dict[str, bool], missing: set[str]
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"architecture": "x86_64", **flags})
    found = {p for p in PRECISIONS if products.missing(CPU, p)}
    assert found == missing


def test_products_multiply() -> None:
    """int8 products are exact; the call that is timed is the product itself."""
    call = products.multiply("cpu", "int8", 64)
    result = call()
    assert result.dtype == torch.int32 and result.shape == (64, 64)  # type: ignore[attr-defined]


def test_rapl_is_summed_over_packages_and_wraps(tmp_path: Path) -> None:
    for number, start in enumerate((900, 50)):
        package = tmp_path / f"intel-rapl:{number}"
        package.mkdir()
        (package / "energy_uj").write_text(str(start))
        (package / "max_energy_range_uj").write_text("999")
    (tmp_path / "intel-rapl:0:0").mkdir()
    meter, reason = energy.rapl(tmp_path)
    assert meter is not None and reason == "" and meter.joules() == 0
    (tmp_path / "intel-rapl:0/energy_uj").write_text("100")
    (tmp_path / "intel-rapl:1/energy_uj").write_text("150")
    assert meter.joules() == pytest.approx(300e-6)
    assert meter.joules() == pytest.approx(300e-6)


def test_without_a_counter_there_is_a_reason(tmp_path: Path) -> None:
    assert energy.rapl(tmp_path) == (
        None, "this machine shows no RAPL counter (virtual machines hide it)",
    )  # fmt: skip
    assert energy.meter("xpu", 0)[0] is None


def test_a_decode_step_in_a_batch_is_that_of_each_alone() -> None:
    from mmctl.engine.model import build

    with torch.inference_mode():
        vlm = build()
        cache = stages.BatchCache(vlm.config, 3, 8, "cpu")
        ids = torch.tensor([1, 2, 3])
        together = stages.decode_step(vlm, ids, cache)
        for row in range(3):
            alone = stages.BatchCache(vlm.config, 1, 8, "cpu")
            alone._kept.copy_(cache._kept[:, :, row : row + 1])
            single = stages.decode_step(vlm, ids[row : row + 1], alone)
            assert torch.allclose(together[row], single[0], atol=1e-5)


def test_flops_and_bytes_are_counted() -> None:
    x, y = torch.ones(8, 16), torch.ones(16, 32)
    flops, moved = stages._counted(lambda: x.view(8, 16) @ y)
    assert flops == 2 * 8 * 16 * 32 and moved == 4 * (8 * 16 + 16 * 32 + 8 * 32)


def test_rounds_take_turns_and_stop_in_time() -> None:
    order: list[str] = []
    cases = [rounds.Case(name, lambda n=name: order.append(n)) for name in "ab"]
    blocks = rounds.run(cases, 0.05)
    assert len(blocks["a"]) == len(blocks["b"]) >= rounds.LEAST_ROUNDS
    assert all(block > 0 for times in blocks.values() for block in times)

    def broken() -> None:
        raise RuntimeError("out of memory\nmore")

    with pytest.raises(MmctlError, match=r"^x: out of memory$"):
        rounds.run([rounds.Case("x", broken)], 1.0)
