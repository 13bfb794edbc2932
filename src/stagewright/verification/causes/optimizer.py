"""Causes of a difference in the optimizer step or in the buffers after it."""

from __future__ import annotations

import torch

from stagewright.verification.assembly import Key
from stagewright.verification.causes.catalogue import cause
from stagewright.verification.causes.patterns import constant_factor, largest
from stagewright.verification.comparison import Comparison, significant_elements
from stagewright.verification.verdict import Cause


def find_optimizer_cause(comparison: Comparison, key: Key) -> Cause | None:
    """Explain the first parameter with a right gradient and a wrong update."""
    old, new = comparison.baseline.values[key._replace(kind="parameter")], comparison.baseline.values[key]
    where = significant_elements(comparison, key)
    expected = (new.double() - old.double())[where]
    name = f"{key.module}.{key.name}".lstrip(".")
    parts, starts = comparison.parts(key), comparison.parts(key._replace(kind="parameter"))
    updates = [(part.value.double() - start.value.double()) for part, start in zip(parts, starts, strict=True)]
    if len(updates) > 1 and any(not torch.equal(update, updates[0]) for update in updates[1:]):
        return cause("replicas diverge", f"{name}: ranks with the same gradient make other updates.")
    update = updates[0][where]
    if not bool(update.any()) and bool(expected.any()):
        return cause("parameter not updated", f"{name} has a right gradient and does not change.")
    noise = torch.finfo(old.dtype).eps * largest(old)
    excess = update - expected
    tolerance = 0.02 + 4 * noise / max(largest(excess), 1e-30)
    decay = constant_factor(excess, old.double()[where], tolerance)
    if decay is not None:
        return cause("weight decay on the wrong group", f"The update of {name} is off by {decay:.3g} × its value.")
    rate = constant_factor(update, expected, 0.01 + 4 * noise / max(largest(expected), 1e-30))
    if rate is not None:
        return cause("learning rate scaled", f"The update of {name} is {rate:.4g} × the baseline's.")
    return None


def find_buffer_cause(comparison: Comparison, key: Key) -> Cause | None:
    """Explain a buffer that is wrong only after the step."""
    name = f"{key.module}.{key.name}".lstrip(".")
    before = comparison.baseline.values.get(key._replace(kind="buffer"))
    for part in comparison.parts(key):
        if before is not None and part.value.shape == before.shape and torch.equal(part.value, before):
            ranks = ", ".join(map(str, part.ranks))
            return cause("stale buffer", f"{name} keeps its value from before the step on rank {ranks}.")
    info = comparison.candidate.modules.get(key.module)
    if info is not None and "BatchNorm" in info.type:
        return cause("batch norm per replica", f"{name} has the statistics of a part of the batch.")
    return cause("stale buffer", f"{name} is updated in another way than in the baseline.")
