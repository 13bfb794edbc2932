"""``with sw.verify(model):`` around a training step in a user's script."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn

from stagewright.errors import UsageError
from stagewright.verification.module_names import Names, find_wrapper, unwrap
from stagewright.verification.perturbation import Perturbation
from stagewright.verification.record import RankRecord, save_record
from stagewright.verification.recorder import Recorder

FOLDER_VARIABLE = "STAGEWRIGHT_VERIFY"
STEP_VARIABLE = "STAGEWRIGHT_VERIFY_STEP"
ROUNDING_VARIABLE = "STAGEWRIGHT_VERIFY_ROUNDING"


@contextmanager
def verify(
    model: nn.Module | Sequence[nn.Module],
    step: int = 0,
    *,
    names: Names | Sequence[Names] = None,
    replica: int | None = None,
    shards: Mapping[str, str] | None = None,
    dropout: bool = True,
    folder: str | Path | None = None,
) -> Iterator[None]:
    """Record the training step in this block, for ``stagewright verify`` to compare with that of the plain model.

    Without ``stagewright verify`` (or a ``folder``) the block runs as if it were not there.

    Args:
        model: The model, wrapped or not (DDP, FSDP, DTensor); a pipeline stage; or all stages of this rank.
        step: The number of this step; only the step that the command asks for is recorded.
        names: For a pipeline stage whose module names differ from the model's: a prefix, a mapping of leading names
            (``{"0": "3"}``) or a function; a list of these for several stages.
        replica: Data-parallel coordinate of this rank; by default that of DDP or FSDP.
        shards: How tensor-parallel modules are sharded, by name pattern: ``column``, ``row``, or ``column:3`` for
            three fused projections. By default the dimension in which a shard is smaller, in the order of ranks.
        dropout: False disables dropout in the block; data parallelism draws other masks than the plain model.
        folder: Where to write the record; by default the folder that ``stagewright verify`` chose.

    Example:
        with sw.verify(model, step=0):
            model(x).square().mean().backward()
    """
    target = folder if folder is not None else os.environ.get(FOLDER_VARIABLE)
    if target is None or step != int(os.environ.get(STEP_VARIABLE, "0" if folder is None else str(step))):
        yield
        return
    models = [model] if isinstance(model, nn.Module) else list(model)
    mappings: list[Any] = list(names) if isinstance(names, list | tuple) else [names] * len(models)
    if len(mappings) != len(models):
        raise UsageError(f"sw.verify: {len(models)} stages but {len(mappings)} mappings of names; give one for each")
    rounding = os.environ.get(ROUNDING_VARIABLE)
    recorder = Recorder(models, mappings, Perturbation(int(rounding)) if rounding else None)
    disabled = [] if dropout else _disable_dropout(models)
    error = ""
    recorder.start()
    try:
        yield
        recorder.finish()
    except BaseException as raised:
        root: BaseException = raised
        while root.__cause__ is not None:
            root = root.__cause__
        error = f"{type(root).__name__}: {' '.join(str(root).split())[:500]}"
        raise
    finally:
        recorder.stop()
        for module in disabled:
            module.train()
        is_distributed = dist.is_available() and dist.is_initialized()
        record = RankRecord(
            rank=dist.get_rank() if is_distributed else 0,
            world_size=dist.get_world_size() if is_distributed else 1,
            step=step,
            replica=replica if replica is not None else _find_replica(models),
            entries=tuple(recorder.entries),
            modules=recorder.modules(),
            tied=recorder.tied,
            shards=dict(shards or {}),
            error=error,
            last_module=recorder.last_module,
        )
        save_record(Path(target), record, recorder.tensors)


def _disable_dropout(models: Sequence[nn.Module]) -> list[nn.Module]:
    """Put active dropout modules into eval mode; return them."""
    active: list[nn.Module] = [
        module
        for model in models
        for module in model.modules()
        if isinstance(module, nn.modules.dropout._DropoutNd | nn.MultiheadAttention) and module.training
    ]
    for module in active:
        module.eval()
    return active


def _find_replica(models: Sequence[nn.Module]) -> int | None:
    """Return this rank's data-parallel coordinate according to DDP, FSDP1 or FSDP2."""
    for model in models:
        wrapper = find_wrapper(model, "DistributedDataParallel") or find_wrapper(model, "FullyShardedDataParallel")
        if wrapper is not None:
            group = wrapper.process_group
            return dist.get_rank(group if isinstance(group, dist.ProcessGroup) else None)
        if find_wrapper(model, "FSDPModule") is not None:
            return _fsdp2_replica(unwrap(model))
    return None


def _fsdp2_replica(model: nn.Module) -> int | None:
    """Return the coordinate on the data axes of an FSDP2 mesh; tensor parallelism is the last axis of a shared mesh."""
    for parameter in model.parameters():
        spec = getattr(parameter, "_spec", None)
        coordinate = spec.mesh.get_coordinate() if spec is not None else None
        if spec is None or coordinate is None:
            continue
        if len(coordinate) == 1:
            return int(coordinate[0])
        replica = 0
        for size, index in list(zip(spec.mesh.shape, coordinate, strict=True))[:-1]:
            replica = replica * size + index
        return replica
    return None
