"""The search with formulas instead of measurements: every plan is forecast by `forecast_plan`, as `forecast` does.

Nothing is simulated, so that thousands of plans on thousands of devices take seconds, and the model's experts count.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from stagewright.analytic.forecast import (
    AnalyticForecast,
    fits,
    forecast_model,
    forecast_plan,
    memory_limits,
    plan_model,
)
from stagewright.analytic.hardware.devices import Accelerator
from stagewright.analytic.shape import TransformerShape
from stagewright.analytic.step import StepModel
from stagewright.cluster.cluster import Cluster
from stagewright.errors import UsageError
from stagewright.planner.baseline import baseline_plan, microbatch_counts
from stagewright.planner.search.choices import SearchSpace, enumerate_plans
from stagewright.planner.search.result import RankedPlan, SearchResult, explain_losers, explain_no_fit, memory_text
from stagewright.schedules.rules import FIXED_SCHEDULES
from stagewright.spec.plan import Axis, Mesh, Plan
from stagewright.spec.plan_rules import check_plan


@dataclass(frozen=True, slots=True, kw_only=True)
class _TimedPlan:
    """A plan that fits, and its step."""

    plan: Plan
    codec: str
    model: StepModel
    step_s: float
    parts: dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class AnalyticSearch:
    """A model on a cluster, whose plans are forecast by formulas."""

    base: Plan
    """What all plans share: model, batch, precision, optimizer."""
    shape: TransformerShape
    cluster: Cluster
    device: Accelerator
    """Rates of the cluster's devices."""
    innermost: Axis = "pipeline"

    @property
    def num_units(self) -> int:
        """Embedding, blocks and head."""
        return self.shape.num_layers + 2

    @property
    def num_experts(self) -> int:
        """Routed experts of a layer; 1 in a dense model."""
        return 1 if self.shape.experts is None else self.shape.experts.num_experts

    def tensor_sizes(self, largest: int) -> list[int]:
        """Return the tensor parallel sizes that divide heads and feed-forward layers."""
        shape = self.shape
        inner = [shape.feed_forward] if shape.experts is None else [shape.feed_forward, shape.experts.feed_forward]
        divided = (shape.num_heads, shape.num_key_heads, *inner)
        return [size for size in range(1, largest + 1) if all(number % size == 0 for number in divided)]

    def forecast(self, plan: Plan) -> AnalyticForecast:
        """Forecast a plan."""
        return forecast_plan(plan, self.shape, self.cluster, innermost=self.innermost, device=self.device)

    def _model(self, plan: Plan) -> StepModel:
        return plan_model(plan, self.shape, self.cluster, innermost=self.innermost, device=self.device)

    def _ranked(self, timed: _TimedPlan, serial_s: float) -> RankedPlan:
        """Return a plan with its whole forecast, which the plans that are not shown do not need."""
        forecast = forecast_model(timed.model, self.cluster, timed.plan.batch, timed.plan, serial_s)
        return RankedPlan(plan=timed.plan, codec=timed.codec, forecast=forecast)

    def search(
        self,
        *,
        top: int = 10,
        schedules: Sequence[str] = FIXED_SCHEDULES,
        recomputes: Sequence[str] = ("none", "always"),
        shards: Sequence[bool] = (False, True),
        zeros: Sequence[int] = (0, 1),
        with_divisions: bool = True,
        codecs: Sequence[str] = ("none",),
        extra_codecs: Sequence[str] = (),
        max_tensor: int = 64,
        num_devices: int | None = None,
    ) -> SearchResult:
        """Find the best plans; of the `extra_codecs` only the best plan is reported, apart from the ranking."""
        begin = time.perf_counter()
        num_devices = num_devices or self.cluster.num_devices
        result = SearchResult()
        serial = self._baseline()
        result.serial = replace(serial, forecast=replace(serial.forecast, serial_s=serial.forecast.step_s))
        serial_s = serial.forecast.step_s
        space = SearchSpace(
            schedules=schedules,
            recomputes=recomputes,
            shards=shards,
            zeros=zeros,
            codecs=tuple(codecs),
            with_divisions=with_divisions,
            devices_per_host=self.cluster.devices_per_host,
            max_tensor=max_tensor,
            max_graph_nodes=None,
        )
        unfit: dict[str, str] = {}
        min_s: dict[str, float] = {}
        timed: list[_TimedPlan] = []
        for plan, codec in enumerate_plans(self.base, self, num_devices, space):
            model = self._model(plan)
            strategy = plan.mesh.strategy
            result.num_plans += 1
            if not fits(model, self.cluster, plan):
                result.num_unfit += 1
                limit, _ = memory_limits(self.cluster, model.layout, plan)
                assert limit is not None
                unfit.setdefault(strategy, f"does not fit: {memory_text(model.peak_memory_bytes(), limit)}")
                continue
            step_s, parts = model.step()
            timed.append(_TimedPlan(plan=plan, codec=codec, model=model, step_s=step_s, parts=parts))
            min_s[strategy] = min(step_s, min_s.get(strategy, math.inf))
        result.num_exact = result.num_plans
        timed.sort(key=lambda candidate: candidate.step_s)
        result.best = [self._ranked(candidate, serial_s) for candidate in timed[:top]]
        result.data_parallel = self._data_parallel(num_devices, serial_s)
        if not result.best:
            raise UsageError(explain_no_fit(self.base, result.data_parallel, unfit, num_devices))
        result.with_codec = self._best_with_codec(timed, extra_codecs, serial_s)
        result.losers = explain_losers(result.best, unfit, min_s)
        result.seconds = time.perf_counter() - begin
        return result

    def _baseline(self) -> RankedPlan:
        """Return the fastest single-device plan that fits, or else the fastest."""
        plans = [baseline_plan(self.base, Mesh(), count) for count in microbatch_counts(self.base.batch)]
        forecasts = [(plan, self.forecast(plan)) for plan in plans]
        plan, forecast = min(forecasts, key=lambda pair: (not pair[1].fits, pair[1].step_s))
        return RankedPlan(plan=plan, codec="none", forecast=forecast)

    def _data_parallel(self, num_devices: int, serial_s: float) -> RankedPlan | None:
        """Return data parallelism with the fewest micro-batches that fit, or with the most if none fits."""
        if self.base.batch < num_devices:
            return None
        ranked: RankedPlan | None = None
        for count in microbatch_counts(-(-self.base.batch // num_devices)):
            plan = baseline_plan(self.base, Mesh(data=num_devices), count)
            try:
                check_plan(plan)
            except UsageError:
                continue
            forecast = replace(self.forecast(plan), serial_s=serial_s)
            ranked = RankedPlan(plan=plan, codec="none", forecast=forecast)
            if forecast.fits:
                return ranked
        return ranked

    def _best_with_codec(
        self, timed: Sequence[_TimedPlan], codecs: Sequence[str], serial_s: float
    ) -> RankedPlan | None:
        """Return the fastest pipeline with one of these codecs, if it is faster than the best plan."""
        best: _TimedPlan | None = None
        min_s = timed[0].step_s
        for candidate in timed:
            if candidate.plan.mesh.pipeline == 1 or candidate.codec != "none":
                continue
            if candidate.step_s - _max_message_s(candidate) >= min_s:
                continue
            for name in codecs:
                plan = replace(candidate.plan, codec=name)
                model = self._model(plan)
                step_s, parts = model.step()
                if step_s < min_s:
                    min_s = step_s
                    best = _TimedPlan(plan=plan, codec=name, model=model, step_s=step_s, parts=parts)
        return None if best is None else self._ranked(best, serial_s)


def _max_message_s(timed: _TimedPlan) -> float:
    """Return an upper bound of the time of a pipeline's messages: those of the steady state and of the bubble.

    `parts` has the messages of all micro-batches but the first. A bubble has at most twice as many as there are ranks.
    """
    steady, bubble, plan = timed.parts["messages"], timed.parts["bubble"], timed.plan
    if plan.microbatches == 1:
        return steady + bubble
    return steady + min(bubble, 2 * plan.mesh.pipeline * steady / (plan.microbatches - 1))
