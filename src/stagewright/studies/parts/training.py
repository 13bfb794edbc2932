"""Train a plan on its task, and what came of it: through a pipeline of workers, or in one process.

by_pipeline       what `stagewright train` runs
by_one_process    the stages one after the other in this process, with the same codecs at the same cuts, forward and
                  backward, which the equality check shows to be the same computation: for a single GPU, and for
                  long runs
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeAlias

from stagewright.errors import UsageError
from stagewright.spec.plan import Plan

__all__ = ["by_one_process", "by_pipeline", "client_cuts"]

Links: TypeAlias = Sequence[tuple[str, str]]
"""The codecs of each cut, forward and backward."""


def client_cuts(plan: Plan, first: int, last: int) -> tuple[str, ...]:
    """Where a model is cut that keeps its first and last units at the client."""
    from stagewright.engine.parallel.replica import capture_for

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
    from stagewright.engine.jobs.train import TrainingOptions, train

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
    from stagewright.engine.pipeline.link_codec import fake_link_codecs

    with Device.parse(device).pinned():
        # What codecs are on the links changes neither the model nor how it is cut.
        lesson = _prepared(replace(plan, codec="none", codec_backward=None), data, device)
        return lesson.learn(fake_link_codecs(plan), tell)


@lru_cache(maxsize=1)
def _prepared(plan: Plan, data: str | None, device: str) -> _OneProcess:
    """The model captured; kept for the next codec, since that takes longer than a short training."""
    return _OneProcess(plan, data, device)


class _OneProcess:
    """A model that can be trained again and again from the same weights, stage by stage in this process."""

    def __init__(self, plan: Plan, data: str | None, device: str) -> None:
        import torch

        from stagewright.cluster.device import Device
        from stagewright.engine.jobs.train import with_samples
        from stagewright.engine.parallel.evaluation import in_eval_mode
        from stagewright.zoo.tasks import load_task

        assert plan.task is not None
        self.plan, self.place = plan, Device.parse(device).torch_device()
        torch.manual_seed(plan.seed)
        model = plan.model.load(batch=4)
        self.task = load_task(plan.task, model, data_dir=data)
        self.samples, self.judged_by = self.task.dataset(self.task.splits[0]), self.task.dataset("evaluation")
        model.module.train().to(self.place)
        self.model = with_samples(model, self.samples, self.place)
        self.first = {name: value.detach().clone() for name, value in model.module.state_dict().items()}
        self.training = self._runner()
        with in_eval_mode(model.module):
            self.judging = self._runner()

    def _runner(self) -> Callable[[Any, Links], Any]:
        """Runs a batch through all stages, with codecs between them, in the mode in which the model is now."""
        import torch

        from stagewright.codecs.header import DTYPES
        from stagewright.engine.jobs.codec_bench import even_cuts
        from stagewright.engine.parallel.replica import capture_for, cut_indices
        from stagewright.engine.pipeline.link_codec import FakeLink

        graph = capture_for(self.plan, self.model)
        cuts = cut_indices(graph, self.plan.cuts) if self.plan.cuts else even_cuts(graph, self.plan.num_stages)
        stages = graph.stages(cuts)
        link: Callable[..., torch.Tensor] = FakeLink.apply

        def run(batch: Any, links: Links) -> Any:
            values = graph.flatten(self._on(batch.args), self._on(batch.kwargs))
            for at, stage in enumerate(stages):
                values = stage(*values)
                if at < len(cuts):
                    wanted = zip(values, graph.needs_gradient(cuts[at]), strict=True)
                    values = [link(v, *links[at]) if one and v.dtype in DTYPES else v for v, one in wanted]
            return graph.unflatten(values)

        return run

    def _on(self, value: Any) -> Any:
        import torch
        from torch.utils import _pytree as pytree

        return pytree.tree_map_only(torch.Tensor, lambda one: one.to(self.place), value)

    def learn(self, links: Links, tell: Callable[[str], None]) -> dict[str, Any]:
        """Train from the first weights, with these codecs on the links."""
        import numpy as np
        import torch

        from stagewright.engine.jobs.measure import make_optimizer

        plan, module = self.plan, self.model.module
        torch.manual_seed(plan.seed)
        module.load_state_dict(self.first)
        module.train()
        optimizer = make_optimizer(plan.optimizer, [one for one in module.parameters() if one.requires_grad])
        per_epoch = -(-len(self.samples) // plan.batch)
        total = plan.steps if plan.epochs is None else plan.epochs * per_epoch
        epochs: list[dict[str, Any]] = []
        seconds, trained = 0.0, 0
        for step in range(total):
            epoch, at = divmod(step, per_epoch)
            order = np.random.default_rng([plan.seed, epoch]).permutation(len(self.samples))
            start = time.perf_counter()
            chosen = order[at * plan.batch : (at + 1) * plan.batch].tolist()
            batch = self.samples.batch(chosen)
            loss = self.model.loss(self.training(batch, links), self._on(batch.target))
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            last_loss = float(loss.detach())
            seconds, trained = seconds + time.perf_counter() - start, trained + len(chosen)
            if (step + 1) % per_epoch == 0 or step + 1 == total:
                row = {"epoch": epoch + 1, self.task.metric_name: self._judge(links), "training_loss": last_loss}
                epochs.append(row)
                tell(f"epoch {epoch + 1}: training loss {last_loss:.4f}")
        return {
            "epochs": epochs,
            "metric": self.task.metric_name,
            "samples_per_s": trained / seconds,
            "run": None,
        }

    def _judge(self, links: Links) -> float:
        import numpy as np
        import torch

        from stagewright.engine.parallel.evaluation import in_eval_mode

        predicted, true = [], []
        with torch.no_grad(), in_eval_mode(self.model.module):
            for one in self.judged_by.batches(self.plan.batch):
                found, target = self.task.predictions(self.judging(one, links), self._on(one.target))
                predicted.append(found)
                true.append(target)
        return float(self.task.metric(np.concatenate(predicted), np.concatenate(true)))
