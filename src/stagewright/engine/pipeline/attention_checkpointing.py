"""Activation checkpointing of attention alone, inside the units of a stage: `recompute = "attention"`.

What is saved and what is recomputed is drawn in ``graph.attention.checkpointing``. What a recomputed forward must not
change is as for whole stages (``activation_checkpointing``). Its random numbers are those of the generators' states at
the beginning of the attention, because a unit may draw others before it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

from torch import nn

from stagewright.engine.batch.batch_norm import find_tracked_norms
from stagewright.engine.pipeline.activation_checkpointing import BufferCopies, ChangingBuffers, RecomputeContext
from stagewright.engine.pipeline.unit_checkpointing import ATTENTION_MARK
from stagewright.engine.tensor.layers import Region
from stagewright.graph.attention.checkpointing import AttentionCall, checkpointed_attentions
from stagewright.graph.attention.structure import find_attentions
from stagewright.graph.stage import Stage


def checkpoint_attentions(
    stages: Iterable[Stage],
    recompute_context: Callable[[], AbstractContextManager[Any]],
    names: Collection[str] | None = None,
) -> None:
    """Recompute the attentions inside the units of a worker's stages, for as long as the stages exist.

    ``recompute_context()`` is entered around every recomputed forward. ``names``: only in these units.
    """
    attentions = {stage: _attentions_of(stage, names) for stage in stages}
    buffers = {attention: ChangingBuffers(attention) for found in attentions.values() for attention in found}

    def contexts(
        attention: nn.Module, _: AttentionCall
    ) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        copies = buffers[attention].copy()
        norms = find_tracked_norms(attention)
        recomputation = RecomputeContext(norms, copies, key=None, inner=recompute_context)
        return _learn(buffers[attention], copies), recomputation

    replaced = ExitStack()
    modules = [attention for found in attentions.values() for attention in found]
    replaced.enter_context(checkpointed_attentions(modules, contexts=contexts, on_reuse=_reopen))
    for stage, found in attentions.items():
        if found:
            stage.__dict__[ATTENTION_MARK] = replaced


def _attentions_of(stage: Stage, names: Collection[str] | None) -> list[nn.Module]:
    """Return the attentions of a stage, or of its units with these names."""
    if names is None:
        return list(find_attentions(stage))
    nodes = [node for node in stage.graph.nodes if node.op == "call_module"]
    units = [node.target for node, call in zip(nodes, stage.calls, strict=True) if call.name in names]
    found = [attention for unit in units for attention in find_attentions(stage.get_submodule(str(unit)))]
    return list(dict.fromkeys(found))


@contextmanager
def _learn(buffers: ChangingBuffers, copies: BufferCopies) -> Iterator[None]:
    """Learn from a first forward which buffers change."""
    versions = buffers.versions()
    yield
    buffers.learn(versions, copies)


def _reopen(layer: nn.Module) -> None:
    """Open the tensor-parallel region of a layer that is not repeated: dropout behind it draws a shard of its mask."""
    region = getattr(layer, "_region", None)
    if isinstance(region, Region):
        region.reopen()
