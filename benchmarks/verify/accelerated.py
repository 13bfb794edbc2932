"""Training scripts with Hugging Face Accelerate."""

from __future__ import annotations

from typing import Any

import torch
from model import Setting, build, loss_of, make_batch, make_optimizer, run_model
from torch.utils.data import DataLoader, TensorDataset

import stagewright as sw


def train(setting: Setting, bug: str, folder: str | None) -> None:
    """Train one step with gradient accumulation over two micro-batches, as Accelerate's guide does."""
    from accelerate import Accelerator
    from accelerate.utils import GradientAccumulationPlugin

    plugin = GradientAccumulationPlugin(num_steps=2, sync_with_dataloader=False)
    accelerator = Accelerator(cpu=True, gradient_accumulation_plugin=plugin)
    batch = make_batch(setting)
    loader: Any = DataLoader(TensorDataset(batch["inputs"], batch["labels"]), batch_size=2)
    model: Any = build(setting)
    optimizer: Any = make_optimizer(model, setting, factor=2.0 if bug == "learning rate" else 1.0)
    if bug == "model not prepared":
        optimizer, loader = accelerator.prepare(optimizer, loader)
    elif bug == "loader not prepared":
        model, optimizer = accelerator.prepare(model, optimizer)
        loader = [tuple(part[:2] for part in rows) for rows in loader][:2]
    else:
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    with sw.verify(model, step=0, folder=folder, replica=accelerator.process_index):
        for inputs, labels in loader:
            with accelerator.accumulate(model):
                loss = loss_of(run_model(model, {"inputs": inputs}), labels)
                if bug == "backward without accelerator":
                    loss.backward()  # accelerator.backward divides by the number of micro-batches
                else:
                    accelerator.backward(loss)
                if setting.clip and (accelerator.sync_gradients or bug == "clip every micro-batch"):
                    accelerator.clip_grad_norm_(model.parameters(), setting.clip)
                optimizer.step()
                if accelerator.sync_gradients:
                    break
    torch.set_grad_enabled(True)
