"""The measured runs and forecasts of the study *stages*, grouped by split. Pure.

A speed-up is the median over rounds of (the pipeline's samples/s ÷ the baseline's samples/s in the same round). With
several rounds its range is known, and two splits whose ranges overlap are not distinguishable.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from stagewright.cluster.device import num_separate
from stagewright.studies.framework.forecasts import ForecastCheck, check_forecasts
from stagewright.studies.framework.phrases import percent
from stagewright.studies.framework.rounds import (
    Speedups,
    baseline_variation,
    median_rate,
    read_rounds,
    speedups_by_round,
)
from stagewright.studies.framework.study import Results
from stagewright.studies.parts.measurements import noise_margin, why_rough

PUBLISHED = {2: 1.94, 3: 3.07, 4: 4.09}
"""Published speed-ups of an image model in stages on 4 machines, inference (PiPPy)."""


_AS_BALANCED = 0.9
"""Balance relative to that of cuts by time from which a policy counts as good."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredRun(Speedups):
    """The runs of one split, one in each round."""

    policy: str
    """The policy that chose the split."""
    also: tuple[str, ...]
    """Later policies that chose the same split."""
    num_stages: int
    samples_per_s: float
    """Median over rounds."""
    shared: bool
    """Whether stages shared a device."""
    sent_bytes: int
    """Bytes sent per step over all cuts."""
    run: str
    """The run folder of the last round; the newest baseline next to it is of the same round."""
    own_baselines: tuple[float, ...] = ()
    """Samples/s of baselines that were repeated with it, instead of those of the rounds."""

    @property
    def policies(self) -> str:
        """All policies that chose this split."""
        return ", ".join((self.policy, *self.also))

    def differs_from(self, other: MeasuredRun) -> bool:
        """Whether every round of one is faster than every round of the other; with one round, by the margin or more."""
        if not self.speedups or not other.speedups:
            return False
        if len(self.speedups) == 1 or len(other.speedups) == 1:
            ratio = self.speedups[0] / other.speedups[0]
            return max(ratio, 1 / ratio) - 1 >= self.margin
        return min(self.speedups) > max(other.speedups) or max(self.speedups) < min(other.speedups)


Runs: TypeAlias = Mapping[str, Sequence[MeasuredRun]]


def measured_runs(results: Mapping[str, Any], options: Mapping[str, Any], mode: str) -> list[MeasuredRun]:
    """List every split that was run, in the order of stages and policies."""
    rounds = options["rounds"]
    baselines = read_rounds(results, f"run-{mode}-serial", rounds)
    all_runs = {
        (count, policy): read_rounds(results, f"run-{mode}-{count}-{policy}", rounds)
        for count in options["stages"]
        for policy in options["policies"]
    }
    margin = max(noise_margin(results), baseline_variation(all_runs.values(), baselines))
    measured = []
    for count in options["stages"]:
        for policy in options["policies"]:
            runs = all_runs[count, policy]
            if not runs:
                continue
            also = tuple(
                later
                for later in options["policies"]
                if any(
                    (results.get(f"run-{mode}-{count}-{later}-{number}") or {}).get("same_as") == policy
                    for number in range(1, rounds + 1)
                )
            )
            first, last = runs[min(runs)], runs[max(runs)]
            num_devices = min(count, num_separate(options["devices"]))
            speedups, implausible = speedups_by_round(runs, baselines, num_devices)
            measured.append(
                MeasuredRun(
                    policy=policy,
                    also=also,
                    num_stages=count,
                    samples_per_s=median_rate(runs),
                    speedups=speedups,
                    implausible=implausible,
                    equal=all(run.equal for run in runs.values()),
                    shared=bool(first.extra.get("shared")),
                    sent_bytes=sum(first.link_bytes.values()),
                    margin=margin,
                    run=str(last.run),
                    own_baselines=tuple(
                        float(run.extra["baseline_samples_per_s"])
                        for run in runs.values()
                        if run.extra.get("baseline_samples_per_s")
                    ),
                )
            )
    return measured


def explained_results(results: Results, runs: Mapping[str, Sequence[MeasuredRun]]) -> Results:
    """Leave out explanations of runs whose speed-up was left out, or whose stages shared devices: it is none."""
    left_out = {
        f"why-{mode}"
        for mode, measured in runs.items()
        if (why := results.get(f"why-{mode}")) is not None
        and any(run.run == why["run"] and (run.speedup is None or run.shared) for run in measured)
    }
    return replace(results, data={name: data for name, data in results.items() if name not in left_out})


def groups_of(splits: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    """Group policies with the same cuts: their names and the split."""
    groups: dict[tuple[str, ...], list[str]] = {}
    for policy, split in splits.items():
        if "error" not in split:
            groups.setdefault(tuple(split["cut_names"]), []).append(policy)
    return [(", ".join(names), splits[names[0]]) for names in groups.values()]


def forecasts_of(results: Mapping[str, Any], mode: str, count: int) -> list[tuple[str, Mapping[str, Any]]]:
    """List the forecasts for a number of stages, with policies of the same split together."""
    saved, forecasts = results.get(f"profile-{mode}"), results.get(f"forecast-{mode}")
    if saved is None or forecasts is None:
        return []
    groups = [
        (names, forecasts[str(count)][split["policy"]]) for names, split in groups_of(saved["splits"][str(count)])
    ]
    return [(names, forecast) for names, forecast in groups if "speedup" in forecast]


def known_change(
    results: Mapping[str, Any], options: Mapping[str, Any], mode: str, runs: Sequence[MeasuredRun]
) -> tuple[Mapping[str, Any] | None, str]:
    """Return the change that is forecast to gain the most, or why that can't be told.

    A gain that is smaller than the error of the forecasts of measured cases may be none.
    """
    change = (results.get(f"why-{mode}") or {}).get("change")
    if change is None:
        return None, ""
    check = forecast_check(results, options, mode, runs)
    gain = percent(change["gain"])
    if check.verdict == "withheld":
        because = f", since {reason}" if (reason := why_rough(results)) else ""
        return None, f"forecasts are withheld{because}, so none says which change would help"
    if check.error > change["gain"]:
        return None, (
            f"the best change ({change['what']}) is forecast to gain {gain}, but forecasts were off by up to "
            f"{percent(check.error)} here"
        )
    return change, ""


def equal_sizes(results: Mapping[str, Any], options: Mapping[str, Any]) -> str:
    """Judge the policy of equal sizes (parameters) by the balance of its stages; "" without it or one to compare."""
    policy = next((name for name in ("time", "optimal") if name in options["policies"]), None)
    if policy is None or "parameters" not in options["policies"]:
        return ""
    pairs = [
        (splits["parameters"]["balance"], splits[policy]["balance"])
        for mode in options["modes"]
        if (saved := results.get(f"profile-{mode}")) is not None
        for splits in saved["splits"].values()
        if "error" not in splits["parameters"] and "error" not in splits[policy]
    ]
    if not pairs:
        return ""
    equal, best = min(pairs, key=lambda pair: pair[0] / pair[1])
    if equal / best >= _AS_BALANCED:
        return f"Equal numbers of parameters are a good policy here: balanced as well as cuts by {policy}."
    return (
        f"Equal numbers of parameters are not always a good policy: the balance falls to {equal:.2f}, where cuts by "
        f"{policy} reach {best:.2f}."
    )


def repeated_baselines(runs: Sequence[MeasuredRun]) -> str:
    """Say which runs are compared with a baseline of their own; "" if none is."""
    texts = [
        f"{run.policies}, {run.num_stages} stages: over {', '.join(f'{rate:.1f}' for rate in run.own_baselines)} "
        "samples/s of one device, measured again with it."
        for run in runs
        if run.own_baselines
    ]
    return " ".join(texts)


def baseline_rate(results: Mapping[str, Any], options: Mapping[str, Any], mode: str) -> float | None:
    """The throughput of the single-device baseline, median over rounds."""
    runs = read_rounds(results, f"run-{mode}-serial", options["rounds"])
    return median_rate(runs) if runs else None


def forecast_check(
    results: Mapping[str, Any], options: Mapping[str, Any], mode: str, runs: Sequence[MeasuredRun]
) -> ForecastCheck:
    """Compare the forecasts of the splits that were run on devices of their own with their measured speed-ups."""
    forecasts = results.get(f"forecast-{mode}") or {}
    if options["cluster"] is not None:
        return ForecastCheck()  # the forecasts are for another machine
    return check_forecasts(
        [
            (run.speedup, forecast_speedup(results, options, mode, forecast))
            for run in runs
            if not run.shared and "speedup" in (forecast := forecasts.get(str(run.num_stages), {}).get(run.policy, {}))
        ],
        busy=why_rough(results),
        is_disturbed=any(run.implausible for run in runs if not run.shared),
    )


def forecast_speedup(
    results: Mapping[str, Any], options: Mapping[str, Any], mode: str, forecast: Mapping[str, Any]
) -> float:
    """Divide a forecast by the measured baseline, like measured speed-ups; on another cluster, by its own baseline.

    The measured baseline runs its batch undivided, which is faster than the micro-batches that the forecast adds up.
    """
    baseline = baseline_rate(results, options, mode)
    if baseline is None or options["cluster"] is not None:
        return float(forecast["speedup"])
    return float(forecast["samples_per_s"]) / baseline


def bound_speedup(
    results: Mapping[str, Any], options: Mapping[str, Any], mode: str, split: Mapping[str, Any]
) -> float | None:
    """The speed-up of a split with free links over one device with the same micro-batches; None where a run beat it.

    A run can beat it, since its baseline has the whole batch at once, or since the machine was slower while the model
    was profiled: then it is no bound.
    """
    bound = float(split["speedup_bound"])
    runs = [run for run in measured_runs(results, options, mode) if run.speedup is not None and not run.shared]
    is_beaten = any(
        (run.speedup or 0.0) > bound
        for run in runs
        if run.num_stages == len(split["cut_names"]) + 1 and split["policy"] in (run.policy, *run.also)
    )
    return None if is_beaten else bound
