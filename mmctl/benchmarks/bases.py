"""How the shipped PCA bases were made: ``python -m mmctl.benchmarks.bases FOLDER``.

Features of a seeded vision transformer with random weights over drawn images: 768 channels after
two layers (shallow), 1024 after eight (deep). Random weights keep what images have in common,
neighbouring patches that look alike, and know nothing of meaning.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from mmctl.engine.errors import quiet_interrupt
from mmctl.engine.responses import pca

if TYPE_CHECKING:
    import torch

PATCH = 14
LAYERS = {"shallow": 2, "deep": 8}
IMAGES = 48


def drawn_images(count: int) -> torch.Tensor:
    """``count`` images [count, 3, 224, 224]: canaries, shifted, mirrored, under soft light."""
    import numpy as np
    import torch

    from mmctl.engine.recovery.canaries import CANARIES, draw

    generator = np.random.default_rng(0)
    found = []
    for number in range(count):
        image = draw(CANARIES[number % len(CANARIES)]).astype(np.float32) / 255
        image = np.roll(image, generator.integers(-60, 60, 2), (0, 1))
        if generator.random() < 0.5:
            image = image[:, ::-1]
        coarse = torch.from_numpy(generator.normal(1, 0.25, (1, 3, 7, 7)).astype(np.float32))
        light = torch.nn.functional.interpolate(coarse, size=image.shape[:2], mode="bicubic")
        found.append(torch.from_numpy(image.copy()).permute(2, 0, 1) * light[0])
    return torch.stack(found)


def features(level: str, images: torch.Tensor) -> Iterator[torch.Tensor]:
    """Features [1, 256, C] of each image, by the seeded transformer of ``level``."""
    import torch

    channels, _ = pca.SHIPPED[level]
    torch.manual_seed(0)
    embed = torch.nn.Conv2d(3, channels, PATCH, PATCH)
    layers = torch.nn.TransformerEncoder(
        torch.nn.TransformerEncoderLayer(
            channels, channels // 64, channels * 2, 0.0, "gelu", batch_first=True, norm_first=True
        ),
        LAYERS[level],
        enable_nested_tensor=False,
    ).eval()
    with torch.inference_mode():
        for image in images:
            yield layers(embed(image[None]).flatten(2).transpose(1, 2))


def main(folder: Path) -> None:
    """Fit and write both bases."""
    images = drawn_images(IMAGES)
    for level, (channels, keep) in pca.SHIPPED.items():
        origin = (
            f"seeded transformer, {channels} channels, {LAYERS[level]} layers, random weights, "
            f"{IMAGES} drawn images"
        )
        basis = pca.fit(features(level, images), keep, origin)
        pca.save(basis, folder / f"pca_{level}.npz")
        print(f"pca_{level}.npz: {basis.explained_ratio:.4f} of the variance", file=sys.stderr)


if __name__ == "__main__":
    with quiet_interrupt():
        main(Path(sys.argv[1]))
