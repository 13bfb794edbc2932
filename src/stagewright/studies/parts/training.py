"""Train a plan on its task, with a pipeline of workers or in one process.

train_by_pipeline       what `stagewright train` runs
train_in_one_process    the stages in sequence in this process, with the same codecs at the same cuts, forward and
                        backward; the parity check shows that this is the same computation. For a single GPU, and for
                        long runs
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeAlias

from stagewright import structure
from stagewright.errors import UsageError
from stagewright.runs.predictions import Predictions
from stagewright.spec.plan import Plan

Links: TypeAlias = Sequence[tuple[str, str]]
"""The codecs of each cut, forward and backward."""


def client_cuts(plan: Plan, first: int, last: int) -> tuple[str, ...]:
    """Return the cuts that leave the first and the last units of a model at the client."""
    from stagewright.engine.parallel.model import capture_for

    model = plan.model.load(batch=2)
    model.module.train(plan.training)
    return cuts_of_client([call.name for call in capture_for(plan, model).calls], first, last, plan.model.name)


def cuts_of_client(names: Sequence[str], first: int, last: int, model: str) -> tuple[str, str]:
    """Return the units to cut after, so that the first and the last ones stay at the client."""
    if first < 1 or last < 1 or first + last >= len(names):
        raise UsageError(
            f"the first {first} and the last {last} of the {len(names)} units of {model!r} can't stay at the "
            "client: keep at least 1 at each end and leave at least 1 to the server"
        )
    return (names[first - 1], names[len(names) - last - 1])


def train_by_pipeline(
    plan: Plan, root: str | Path, *, data: str | None, note: Callable[[str], None] = lambda text: None
) -> dict[str, Any]:
    """Train with workers; return epochs, predictions, rate and the run folder, relative to the parent of `root`."""
    from stagewright.engine.jobs.train import TrainingOptions, train

    def progress(line: Any) -> None:
        if line["kind"] == "epoch":
            note(f"epoch {line['epoch']}: training loss {line['training_loss']:.4f}")

    result = train(plan, root, options=TrainingOptions(data_dir=data), progress=progress).to_dict()
    predictions = Predictions.load(Path(result["run"]))
    return {
        **{key: result[key] for key in ("epochs", "metric", "samples_per_s")},
        "predictions": predictions.to_dict() if predictions is not None else None,
        "run": f"{Path(root).name}/{Path(result['run']).name}",
    }


def train_in_one_process(
    plan: Plan, *, data: str | None, device: str, note: Callable[[str], None] = lambda text: None
) -> dict[str, Any]:
    """Train in this process, pinned to one device; return epochs, predictions and samples/s."""
    from stagewright.cluster.device import Device
    from stagewright.engine.pipeline.link_codec import fake_link_codecs

    with Device.parse(device).pinned():
        # Codecs change neither the model nor its cuts, so every codec uses the same trainer.
        trainer = _trainer(replace(plan, codec="none", codec_backward=None), data, device)
        return trainer.train(fake_link_codecs(plan), note)


@lru_cache(maxsize=1)
def _trainer(plan: Plan, data: str | None, device: str) -> _Trainer:
    """Capture the model; cached for the next codec, since capturing takes longer than a short training."""
    return _Trainer(plan, data, device)


class _Trainer:
    """Trains a model repeatedly from the same initial weights, stage by stage in this process."""

    def __init__(self, plan: Plan, data: str | None, device: str) -> None:
        import torch

        from stagewright.cluster.device import Device
        from stagewright.engine.jobs.train import with_samples
        from stagewright.engine.parallel.evaluation import in_eval_mode
        from stagewright.zoo.tasks import load_task

        assert plan.task is not None
        self.plan, self.device = plan, Device.parse(device).torch_device()
        torch.manual_seed(plan.seed)
        model = plan.model.load(batch=4)
        self.task = load_task(plan.task, model, data_dir=data)
        self.samples, self.evaluation_samples = self.task.dataset(self.task.splits[0]), self.task.dataset("evaluation")
        model.module.train().to(self.device)
        self.model = with_samples(model, self.samples, self.device)
        self.initial_state = {name: value.detach().clone() for name, value in model.module.state_dict().items()}
        self.run_training = self._build_runner()
        with in_eval_mode(model.module):
            self.run_evaluation = self._build_runner()

    def _build_runner(self) -> Callable[[Any, Links], Any]:
        """Build a function that runs a batch through all stages with codecs in between, in the model's current mode."""
        import torch

        from stagewright.codecs.header import DTYPES
        from stagewright.engine.jobs.codec_bench import even_cuts
        from stagewright.engine.parallel.model import capture_for, cut_indices
        from stagewright.engine.pipeline.link_codec import FakeLink

        graph = capture_for(self.plan, self.model)
        cuts = cut_indices(graph, self.plan.cuts) if self.plan.cuts else even_cuts(graph, self.plan.num_stages)
        stages = graph.stages(cuts)
        link: Callable[..., torch.Tensor] = FakeLink.apply

        def run(batch: Any, links: Links) -> Any:
            values = graph.flatten(self._to_device(batch.args), self._to_device(batch.kwargs))
            for index, stage in enumerate(stages):
                values = stage(*values)
                if index < len(cuts):
                    crossing = zip(values, graph.needs_gradient(cuts[index]), strict=True)
                    values = [
                        link(value, *links[index]) if needs_gradient and value.dtype in DTYPES else value
                        for value, needs_gradient in crossing
                    ]
            return graph.unflatten(values)

        return run

    def _to_device(self, value: Any) -> Any:

        return structure.map_tensors(lambda tensor: tensor.to(self.device), value)

    def train(self, links: Links, note: Callable[[str], None]) -> dict[str, Any]:
        """Train from the initial weights with these codecs on the links."""
        import numpy as np
        import torch

        from stagewright.engine.parallel.optimizer import make_optimizer

        plan, module = self.plan, self.model.module
        torch.manual_seed(plan.seed)
        module.load_state_dict(self.initial_state)
        module.train()
        optimizer = make_optimizer(plan.optimizer, [p for p in module.parameters() if p.requires_grad])
        per_epoch = -(-len(self.samples) // plan.batch)
        total = plan.steps if plan.epochs is None else plan.epochs * per_epoch
        epochs: list[dict[str, Any]] = []
        seconds, trained = 0.0, 0
        for step in range(total):
            epoch, step_in_epoch = divmod(step, per_epoch)
            order = np.random.default_rng([plan.seed, epoch]).permutation(len(self.samples))
            start = time.perf_counter()
            chosen = order[step_in_epoch * plan.batch : (step_in_epoch + 1) * plan.batch].tolist()
            batch = self.samples.batch(chosen)
            loss = self.model.loss(self.run_training(batch, links), self._to_device(batch.target))
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            last_loss = float(loss.detach())
            seconds, trained = seconds + time.perf_counter() - start, trained + len(chosen)
            if (step + 1) % per_epoch == 0 or step + 1 == total:
                score, predictions = self._evaluate(links)
                row = {"epoch": epoch + 1, self.task.metric_name: score, "training_loss": last_loss}
                epochs.append(row)
                note(f"epoch {epoch + 1}: training loss {last_loss:.4f}")
        return {
            "epochs": epochs,
            "metric": self.task.metric_name,
            "samples_per_s": trained / seconds,
            "predictions": predictions.to_dict(),
            "run": None,
        }

    def _evaluate(self, links: Links) -> tuple[float, Predictions]:
        import numpy as np
        import torch

        from stagewright.engine.parallel.evaluation import in_eval_mode

        pairs = []
        with torch.no_grad(), in_eval_mode(self.model.module):
            for batch in self.evaluation_samples.batches(self.plan.batch):
                outputs = self.run_evaluation(batch, links)
                pairs.append(self.task.predictions(outputs, self._to_device(batch.target)))
        predicted, labels = (np.concatenate(column) for column in zip(*pairs, strict=True))
        assert self.task.metric is not None
        return float(self.task.metric(predicted, labels)), Predictions(labels=labels, predicted=predicted)
