"""Train a plan on its task, and what came of it: through a pipeline of workers, or in one process.

by_pipeline       what `stagewright train` runs
by_one_process    the stages one after the other in this process, with the same codecs at the same cuts, forward and
                  backward, which the equality check shows to be the same computation: for a single GPU, and for
                  long runs
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from stagewright.errors import UsageError
from stagewright.plan.value import Plan

__all__ = ["by_one_process", "by_pipeline", "client_cuts"]


def client_cuts(plan: Plan, first: int, last: int) -> tuple[str, ...]:
    """Where a model is cut that keeps its first and last units at the client."""
    from stagewright.engine.replica import capture_for

    model = plan.model.load(batch=2)
    model.module.train(plan.training)
    names = [call.name for call in capture_for(plan, model).calls]
    if first < 1 or last < 1 or first + last >= len(names):
        raise UsageError(
            f"the first {first} and the last {last} of the {len(names)} units of {plan.model.name!r} can't stay at the "
            "client: keep at least 1 each and leave at least 1 to the server"
        )
    return (names[first - 1], names[len(names) - last - 1])


def by_pipeline(
    plan: Plan, root: str | Path, *, data: str | None, tell: Callable[[str], None] = lambda text: None
) -> dict[str, Any]:
    """Train with workers; epochs, metric, samples/s and the run's folder."""
    from stagewright.engine.training_job import TrainingOptions, train

    def progress(line: Any) -> None:
        if line["kind"] == "epoch":
            tell(f"epoch {line['epoch']}: training loss {line['training_loss']:.4f}")

    found = train(plan, root, options=TrainingOptions(data_dir=data), progress=progress)
    return {key: found[key] for key in ("epochs", "metric", "samples_per_s", "run")}


def by_one_process(
    plan: Plan, *, data: str | None, device: str, tell: Callable[[str], None] = lambda text: None
) -> dict[str, Any]:
    """Train in this process on one device, to whose cores it keeps; epochs, metric and samples/s."""
    from stagewright.cluster.device import Device

    with Device.parse(device).pinned():
        return _by_one_process(plan, data, device, tell)


def _by_one_process(plan: Plan, data: str | None, device: str, tell: Callable[[str], None]) -> dict[str, Any]:
    import numpy as np
    import torch
    from torch.utils import _pytree as pytree

    from stagewright.cluster.device import Device
    from stagewright.codec.header import DTYPES
    from stagewright.engine.codec_bench import even_cuts
    from stagewright.engine.evaluation import in_eval_mode
    from stagewright.engine.job import make_optimizer
    from stagewright.engine.link_codec import FakeLink, fake_links
    from stagewright.engine.replica import capture_for, cut_indices
    from stagewright.engine.training_job import with_samples
    from stagewright.zoo.tasks import load_task

    assert plan.task is not None
    place = Device.parse(device).torch_device()
    torch.manual_seed(plan.seed)
    model = plan.model.load(batch=4)
    task = load_task(plan.task, model, data_dir=data)
    links = fake_links(plan)
    link: Callable[..., torch.Tensor] = FakeLink.apply

    def on(value: Any) -> Any:
        return pytree.tree_map_only(torch.Tensor, lambda one: one.to(place), value)

    model.module.train().to(place)
    model = with_samples(model, task.dataset(task.splits[0]), place)

    def runner() -> Callable[[Any], Any]:
        graph = capture_for(plan, model)
        cuts = cut_indices(graph, plan.cuts) if plan.cuts else even_cuts(graph, plan.num_stages)
        stages = graph.stages(cuts)

        def run(batch: Any) -> Any:
            values = graph.flatten(on(batch.args), on(batch.kwargs))
            for at, stage in enumerate(stages):
                values = stage(*values)
                if at < len(cuts):
                    wanted = zip(values, graph.needs_gradient(cuts[at]), strict=True)
                    values = [link(v, *links[at]) if one and v.dtype in DTYPES else v for v, one in wanted]
            return graph.unflatten(values)

        return run

    training = runner()
    with in_eval_mode(model.module):
        judging = runner()
    optimizer = make_optimizer(plan.optimizer, [one for one in model.module.parameters() if one.requires_grad])
    samples, judged_by = task.dataset(task.splits[0]), task.dataset("evaluation")
    per_epoch = -(-len(samples) // plan.batch)
    total = plan.steps if plan.epochs is None else plan.epochs * per_epoch
    epochs: list[dict[str, Any]] = []
    seconds, trained = 0.0, 0
    for step in range(total):
        epoch, at = divmod(step, per_epoch)
        order = np.random.default_rng([plan.seed, epoch]).permutation(len(samples))
        start = time.perf_counter()
        chosen = order[at * plan.batch : (at + 1) * plan.batch].tolist()
        batch = samples.batch(chosen)
        loss = model.loss(training(batch), on(batch.target))
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        last_loss = float(loss.detach())
        seconds, trained = seconds + time.perf_counter() - start, trained + len(chosen)
        if (step + 1) % per_epoch == 0 or step + 1 == total:
            predicted, true = [], []
            with torch.no_grad(), in_eval_mode(model.module):
                for one in judged_by.batches(plan.batch):
                    found, target = task.predictions(judging(one), on(one.target))
                    predicted.append(found)
                    true.append(target)
            metric = task.metric(np.concatenate(predicted), np.concatenate(true))
            epochs.append({"epoch": epoch + 1, task.metric_name: float(metric), "training_loss": last_loss})
            tell(f"epoch {epoch + 1}: training loss {last_loss:.4f}")
    return {"epochs": epochs, "metric": task.metric_name, "samples_per_s": trained / seconds, "run": None}
