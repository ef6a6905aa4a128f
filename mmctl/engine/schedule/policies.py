"""Policies by name: which stages go where, who takes a request, who waits for whom.

The baselines route over the roles that the devices were given and serve first come, first
served; ``colocated_fcfs`` and the splits set the roles themselves. ``perception`` is ours:
images encoded beside the decoder and on whichever device is least loaded, text before vision
with ageing, micro-batches of one image size, and the device with the least expected seconds by
its perception weight.

A policy that differs by its parameters is an entry of ``POLICIES``, and a parameter that a sweep
shall set is also a field of ``sweep.Plan`` and of ``plan.Chosen``. Another routing, or another
order of a queue, is a number of ``layout.Rule`` that ``kernel`` heeds (``placing``, ``lists``).
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from mmctl.engine import plugins
from mmctl.engine.errors import MmctlError, UsageError, nearest
from mmctl.engine.schedule.costs import Model
from mmctl.engine.schedule.fleet import Device, with_role
from mmctl.engine.schedule.layout import DECODE, ENCODE, PREFILL, ROUTINGS, Rule

NEVER_S = 1e18


class Policy(msgspec.Struct, frozen=True, kw_only=True):
    """What a policy's name stands for, with the parameters that a sweep may set.

    ``encoders`` and ``prefillers`` are shares of the fleet (None: roles stay as given).
    """

    name: str
    routing: str
    by_modality: bool = False
    encoders: float | None = None
    prefillers: float | None = None
    encode_patches: int = 16384
    encode_images: int = 8
    few_images: int = 8
    inline_images: int = 0
    decode_ratio: float = 1.0
    age_s: float = NEVER_S


POLICIES = {
    policy.name: policy
    for policy in (
        *(Policy(name=name, routing=name) for name in ROUTINGS if name != "perception"),
        Policy(name="colocated_fcfs", routing="least_outstanding", encoders=0.0),
        Policy(name="split_e_pd", routing="least_outstanding", encoders=0.25),
        Policy(name="split_e_p_d", routing="least_outstanding", encoders=0.25, prefillers=0.25),
        Policy(
            name="perception",
            routing="perception",
            by_modality=True,
            encode_images=32,
            age_s=5.0,
            decode_ratio=0.3,
        ),
    )
}


def one(name: str) -> Policy:
    """The policy of that name, ours or a plugin's; UsageError with a suggestion if none."""
    if name in POLICIES:
        return POLICIES[name]
    added = plugins.named("mmctl.policies")
    if name not in added:
        known = [*POLICIES, *added]
        raise UsageError(f"unknown policy '{name}'{nearest(name, known)}")
    policy = plugins.load(added[name])
    if not isinstance(policy, Policy) or policy.routing not in ROUTINGS:
        raise MmctlError(f"the plugin '{name}' is no Policy with one of the known routings")
    return msgspec.structs.replace(policy, name=name)


def named(text: str) -> list[Policy]:
    """The policies of a comma-separated list; ``all`` is every one."""
    if text == "all":
        return list(POLICIES.values())
    found = [one(name) for name in filter(None, (part.strip() for part in text.split(",")))]
    if not found:
        raise UsageError("no policy: name some, or all")
    return found


def rule(policy: Policy, *, output_mean: float, seed: int) -> Rule:
    """The policy in the numbers that the loop takes."""
    return Rule(
        routing=ROUTINGS.index(policy.routing), by_modality=int(policy.by_modality),
        age_s=float(policy.age_s), encode_patches=policy.encode_patches,
        encode_images=policy.encode_images, few_images=policy.few_images,
        inline_images=policy.inline_images, decode_ratio=float(policy.decode_ratio),
        output_mean=float(output_mean), receipts=0, log=0, seed=seed,
    )  # fmt: skip


def place(policy: Policy, devices: Sequence[Device], model: Model) -> list[Device]:
    """The devices with the roles that the policy gives them.

    Encoders are those that lose least by it: little bandwidth for their compute, too little
    memory for the decoder first of all.
    """
    if policy.encoders is None or not model.vision_layers:
        return list(devices)
    everything = ENCODE | PREFILL | DECODE
    if policy.encoders == 0.0:
        return [with_role(device, model, everything) for device in devices]
    placed = [with_role(device, model, PREFILL | DECODE) for device in devices]
    small = [i for i, device in enumerate(placed) if not device.role & DECODE]
    able = [i for i in range(len(devices)) if i not in small]
    able.sort(key=lambda i: (-step_s(devices[i]), i))
    wanted = max(1, round(policy.encoders * len(devices)))
    chosen = [*small, *able[: max(0, min(wanted, len(devices) - 1) - len(small))]]
    for i in chosen:
        placed[i] = with_role(devices[i], model, ENCODE)
    rest = [i for i in able if i not in chosen]
    if policy.prefillers and len(rest) > 1:
        count = min(len(rest) - 1, max(1, round(policy.prefillers * len(devices))))
        for i in rest[-count:]:
            placed[i] = with_role(devices[i], model, PREFILL)
        for i in rest[:-count]:
            placed[i] = with_role(devices[i], model, DECODE)
    return placed


def step_s(device: Device) -> float:
    """Seconds of a decode step of 32 sequences: what a device is worth as a decoder."""
    return float(device.cost.dense_s[32])
