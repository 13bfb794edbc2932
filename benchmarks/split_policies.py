"""Measured stage times of every split policy: whether `optimal` has the fastest bottleneck stage.

    python benchmarks/split_policies.py --model deit-small --stages 4

Units are profiled, each policy cuts, then all stages of all policies are timed in the same rounds. Each policy's
slowest stage is printed relative to that of `optimal`; a ratio below 1 by more than the spread is a defect.
"""

from __future__ import annotations

import argparse

from record import write_record


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="digits-vit")
    parser.add_argument("--stages", type=int, default=4)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--device", default="cpu:0")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--inference", action="store_true")
    parser.add_argument("--output", default="split_policies.json")
    options = parser.parse_args()
    from stagewright.cluster.device import Device, pin_process

    device = Device.parse(options.device)
    pin_process(device)  # before torch is imported

    import stagewright as sw
    from stagewright import zoo
    from stagewright.partition import compare
    from stagewright.profiler import measure_stages

    model = zoo.load(options.model, batch=options.batch)
    training = not options.inference
    model.module.train(training)
    graph = sw.capture(model.module, model.args, model.kwargs)
    common = {"device": device, "repeats": options.repeats, "training": training}
    profile = sw.profile(graph, model.args, model.kwargs, name=options.model, cache=False, **common)
    comparison = compare(profile, options.stages)
    times = measure_stages(graph, model.args, model.kwargs, splits=[split.cuts for split in comparison], **common)
    slowest = {split.policy: max(stage.total_s for stage in row) for split, row in zip(comparison, times, strict=True)}
    print(f"{options.model}: units add up to {profile.coverage:.1%} of the whole model's time")
    rows = []
    for split, row in zip(comparison, times, strict=True):
        spread = max(stage.forward.spread_s + stage.backward_spread_s for stage in row)
        rows.append(
            {
                "policy": split.policy,
                "cuts": list(split.cut_names),
                "stage_s": [stage.total_s for stage in row],
                "slowest_over_optimal": slowest[split.policy] / slowest["optimal"],
                "spread_over_optimal": spread / slowest["optimal"],
                "predicted_over_optimal": split.bottleneck_s / comparison["optimal"].bottleneck_s,
                "sum_over_slowest": sum(stage.total_s for stage in row) / slowest[split.policy],
            }
        )
        result = rows[-1]
        print(
            f"  {split.policy:14} slowest stage {result['slowest_over_optimal']:.3f} × that of optimal "
            f"(±{result['spread_over_optimal'] / 2:.3f}, predicted {result['predicted_over_optimal']:.3f}); "
            f"speed-up of an endless stream at most {result['sum_over_slowest']:.2f}; "
            f"cut after {', '.join(split.cut_names)}"
        )
    write_record(options.output, {"coverage": profile.coverage, "rows": rows})


if __name__ == "__main__":
    main()
