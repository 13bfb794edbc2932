"""Does a codec cost accuracy? The same fine-tuning with each codec on the links of a pipeline, over several seeds.

    python benchmarks/codec_accuracy.py cola --data DIR --weights DIR/minilm-l6 --steps 80      a pipeline of workers
    python benchmarks/codec_accuracy.py cola … --one-process --device cuda                      the same codecs in one

A pipeline is what `stagewright train` runs. In one process the model runs stage by stage with the same codecs at the
same cuts, forward and backward, which the equality check shows to be the same computation: for a single GPU, and for
long runs. Codecs are named FORWARD or FORWARD/BACKWARD. Writes JSON; prints a table last: mean and standard deviation.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import tempfile
from pathlib import Path
from typing import Any

MODELS = {"cola": "bert-minilm", "rte": "bert-minilm", "cifar10": "mobilenet-v2", "digits": "digits-vit"}
CODECS = "none,bf16,block8,block4/block8,hadamard4/block8,hadamard4,block4,sort6+2,sort3+1"


def plan_of(options: argparse.Namespace, name: str, seed: int) -> Any:
    from stagewright.plan.value import Mesh, ModelSpec, OptimizerSpec, Plan
    from stagewright.zoo import tasks

    forward, _, backward = name.partition("/")
    return Plan(
        model=ModelSpec(
            name=MODELS[options.task],
            weights=options.weights,
            sequence_length=options.sequence_length if options.task in ("cola", "rte") else None,
            image_size=options.image_size if options.task == "cifar10" else None,
            num_classes=tasks.entry(options.task).num_classes,
            seed=seed,
        ),
        batch=options.batch,
        mesh=Mesh(pipeline=options.stages),
        microbatches=options.microbatches,
        split="blocks",
        task=options.task,
        steps=options.steps or 1,
        epochs=None if options.steps else options.epochs,
        optimizer=OptimizerSpec(name="adamw", learning_rate=options.learning_rate),
        codec=forward,
        codec_backward=backward or None,
        seed=seed,
    )


def run(options: argparse.Namespace, name: str, seed: int) -> dict[str, Any]:
    """One training; the study `codecs` has the two ways to do it."""
    from stagewright.cluster.machine import default_devices
    from stagewright.study.finetune import by_one_process, by_pipeline

    plan = plan_of(options, name, seed)
    if options.one_process:
        return by_one_process(plan, data=options.data, device=options.device)
    plan = dataclasses.replace(plan, devices=tuple(options.devices or default_devices(plan.mesh.num_workers)))
    with tempfile.TemporaryDirectory() as root:
        return by_pipeline(plan, root, data=options.data)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("task", choices=sorted(MODELS))
    parser.add_argument("--data", default=os.environ.get("STAGEWRIGHT_DATA"))
    parser.add_argument("--weights", default=None)
    parser.add_argument("--codecs", default=CODECS)
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--steps", type=int, default=0, help="instead of epochs")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--microbatches", type=int, default=2)
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--sequence-length", type=int, default=64)
    parser.add_argument("--image-size", type=int, default=96)
    parser.add_argument("--learning-rate", type=float, default=5e-5)
    parser.add_argument("--devices", nargs="*", default=None)
    parser.add_argument("--one-process", action="store_true")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", ".")) / "codec_accuracy.json")
    options = parser.parse_args()
    shown = {key: str(value) for key, value in vars(options).items() if key not in ("data", "weights", "out")}
    result: dict[str, Any] = {"options": shown, "codecs": {}}
    for name in options.codecs.split(","):
        for seed in map(int, options.seeds.split(",")):
            found = run(options, name, seed)
            result["codecs"].setdefault(name, {})[seed] = found
            options.out.write_text(json.dumps(result, indent=1) + "\n")
            metric = found["metric"]
            rate = f"{found['samples_per_s']:.1f} samples/s"
            print(f"{name:20} seed {seed}: {metric} {found['epochs'][-1][metric]:.4f}, {rate}", flush=True)
    print(
        f"\n{options.task}, {len(options.seeds.split(','))} seeds, "
        + ("one process" if options.one_process else "pipeline")
    )
    for name, seeds in result["codecs"].items():
        values = [one["epochs"][-1][one["metric"]] for one in seeds.values()]
        spread = statistics.stdev(values) if len(values) > 1 else 0.0
        print(f"{name:20} {100 * statistics.fmean(values):6.2f} ± {100 * spread:.2f}")


if __name__ == "__main__":
    main()
