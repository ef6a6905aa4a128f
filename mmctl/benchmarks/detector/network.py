"""The detector's network and its training (torch).

Three convolutions over time see how a pool got where it is; the newest reading, its step from
the one before and the mean of the last eight stand beside them, for a conflict often comes with
a single arrival. Two logits come out: a conflict now, and out of memory within the horizon.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from mmctl.benchmarks.detector.windows import FEATURES, SAMPLES, Series

OUTPUTS = ("conflict", "oom")
CHANNELS, KERNEL, STRIDE = 64, 5, 2
WIDTHS = (256, 64)
RECENT = 8
LIMIT = 4.0
"""Where a feature's history is cut, in spreads: a single spike would cost INT8 all its steps."""
STEP_SCALE = 4.0  # a step between two readings is small beside their spread
BATCH = 256
RARE = BATCH // 4  # of a batch, windows in which a conflict holds
RATE = 3e-3

Weights = dict[str, NDArray[np.float32]]


class Network(nn.Module):
    """Windows ``[n, 64, features]`` → logits ``[n, 2]``."""

    mean: Tensor
    spread: Tensor

    def __init__(self, mean: Tensor, spread: Tensor) -> None:
        super().__init__()
        features = len(FEATURES)
        self.register_buffer("mean", mean)
        self.register_buffer("spread", spread)
        self.conv0 = nn.Conv1d(features, CHANNELS, KERNEL, STRIDE)
        self.conv1 = nn.Conv1d(CHANNELS, CHANNELS, KERNEL, STRIDE)
        self.conv2 = nn.Conv1d(CHANNELS, CHANNELS, KERNEL, STRIDE)
        steps = SAMPLES
        for _ in range(3):
            steps = (steps - KERNEL) // STRIDE + 1
        self.full0 = nn.Linear(CHANNELS * steps + 3 * features, WIDTHS[0])
        self.full1 = nn.Linear(*WIDTHS)
        self.full2 = nn.Linear(WIDTHS[1], len(OUTPUTS))

    def forward(self, windows: Tensor) -> Tensor:
        """Windows ``[batch, readings, signals]``, in the signals' units, to logits ``[batch]``."""
        x = (windows - self.mean) / self.spread
        y = x.clamp(-LIMIT, LIMIT).transpose(1, 2)
        for conv in (self.conv0, self.conv1, self.conv2):
            y = functional.relu(conv(y))
        newest, before = x[:, -1], x[:, -2]
        seen = [y.flatten(1), newest, STEP_SCALE * (newest - before), x[:, -RECENT:].mean(1)]
        z = functional.relu(self.full0(torch.cat(seen, 1)))
        logits: Tensor = self.full2(functional.relu(self.full1(z)))
        return logits

    def weights(self) -> Weights:
        """Every parameter and both buffers as arrays, by name."""
        return {name: tensor.numpy().copy() for name, tensor in self.state_dict().items()}


def train(
    learned: Sequence[Series], epochs: int, seed: int = 0,
    tell: Callable[[float], None] = lambda share: None,
) -> Network:  # fmt: skip
    """A network trained on all windows of ``learned``; conflicts, which are rare, are drawn more
    often. The same seed and series give the same network on the same machine."""
    values = np.concatenate([one.values for one in learned])
    offsets = np.cumsum([0, *(len(one.values) for one in learned[:-1])])
    # The place of a window's first reading in all readings laid end to end.
    starts = np.concatenate(
        [at + np.arange(len(one.conflict)) for at, one in zip(offsets, learned, strict=True)]
    )
    truth = np.concatenate([np.stack([one.conflict, one.oom], 1) for one in learned])
    rare = np.flatnonzero(truth[:, 0])
    spread = values.std(0) + 1e-3
    state = torch.random.get_rng_state()
    torch.manual_seed(seed)
    network = Network(torch.from_numpy(values.mean(0)), torch.from_numpy(spread))
    torch.random.set_rng_state(state)
    steps = max(1, epochs * len(starts) // BATCH)
    optimizer = torch.optim.AdamW(network.parameters(), RATE, weight_decay=1e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, total_steps=steps)
    random = np.random.default_rng(seed)
    within = np.arange(SAMPLES)
    for step in range(steps):
        chosen = random.integers(0, len(starts), BATCH)
        if len(rare):
            chosen[:RARE] = random.choice(rare, RARE)
        batch = torch.from_numpy(values[starts[chosen, None] + within])
        wanted = torch.from_numpy(truth[chosen].astype(np.float32))
        loss = functional.binary_cross_entropy_with_logits(network(batch), wanted)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        schedule.step()
        if step % 16 == 0:
            tell(step / steps)
    return network.eval().requires_grad_(False)
