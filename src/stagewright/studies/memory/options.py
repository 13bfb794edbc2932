"""Options of the study *memory*, and the plan of each of its runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from stagewright.errors import UnknownName, UsageError
from stagewright.quantity import parse_bytes
from stagewright.spec.activation_checkpointing import checkpoint_by_block
from stagewright.spec.optimizers import OPTIMIZERS
from stagewright.spec.plan import Mesh, ModelSpec, OptimizerSpec, Plan
from stagewright.studies.framework.options import Note, option, parse_words, setting, show_bytes
from stagewright.studies.parts.devices import choose_devices, devices_option

STRATEGIES = ("data", "tensor", "pipeline")
_BLOCK = "transformer.h."  # name of the family's blocks, before their number


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Data, tensor and pipeline parallel on two devices: speed-up, memory, activation checkpointing, most layers."""

    # GPUs have larger defaults: at the sizes for CPU cores they would measure kernel launches and library workspaces.

    model: str = option(
        "gpt-layers:6", "Model; a family with a free number of layers.", on_gpus="gpt-layers:12", quick="gpt-layers:3"
    )
    quick: bool = setting(False)
    strategies: tuple[str, ...] = option(
        STRATEGIES, "Strategy; with commas.", parse=parse_words, flag="--strategy", choices=STRATEGIES
    )
    sequence_length: int = option(64, "Tokens per sample.", minimum=1, on_gpus=128, quick=96)
    batch: int = option(8, "Global batch: samples in a step.", minimum=1, on_gpus=16, quick=8)
    checkpointing: tuple[str, ...] = option(
        ("serial", *STRATEGIES),
        "Strategies to run with activation checkpointing too; the others are forecast.",
        parse=parse_words,
        choices=("serial", *STRATEGIES),
        quick=("serial", "tensor"),
    )
    microbatches: int = option(4, "Micro-batches of a replica.", minimum=1)
    rounds: int = option(3, "Repeat every run this many times.", minimum=1, quick=1, panel="Execution")
    steps: int = option(3, "Timed steps.", minimum=1, on_gpus=5, panel="Execution")
    warmup: int = setting(2, quick=0)
    """Untimed steps before them; quick: only those of the parity check and of the count of memory, four or more."""
    repeats: int = setting(3, quick=1)
    """Measurements of each unit."""
    devices: tuple[str, ...] = devices_option("two GPUs")
    """One device per worker."""
    memory_bytes: int = option(
        256 * 2**20,
        "Memory limit of each device, like 2GiB; in the search for the most layers.",
        flag="--memory",
        parse=parse_bytes,
        show=show_bytes,
        on_gpus=2**30,
        quick=100 * 2**20,
    )
    fits: tuple[str, ...] | None = option(
        None,
        "Find the most layers by running for data, tensor+recompute, …",
        parse=parse_words,
        default_text="all; quick: two",
    )
    """None: every strategy with and without activation checkpointing; quick: two of them."""
    optimizer: str = option("adamw", "Optimizer.", choices=tuple(OPTIMIZERS), quick="sgd")
    seed: int = option(0, "Random seed; of weights and samples.", panel="Execution")

    def __post_init__(self) -> None:
        family, _, layers = self.model.partition(":")
        if family != "gpt-layers" or not layers.isdigit():
            raise UsageError(
                f"{self.model!r} has no free number of layers: use --model gpt-layers:N, like gpt-layers:8"
            )
        if len(self.devices) < 2:
            raise UsageError(f"{len(self.devices)} device is not enough: give two, like --devices cpu:0,cpu:1")
        for strategy in self.strategies:
            if strategy not in STRATEGIES:
                raise UnknownName("strategy", strategy, STRATEGIES)
        for strategy in self.checkpointing:
            if strategy not in ("serial", *STRATEGIES):
                raise UnknownName("strategy", strategy, ("serial", *STRATEGIES))
        shares = {"data": 2, "pipeline": self.microbatches}
        least = max((shares.get(strategy, 1) for strategy in self.strategies), default=1)
        if self.batch < least:
            raise UsageError(
                f"a batch of {self.batch} can't be split over two replicas and {self.microbatches} micro-batches: use "
                f"--batch {least} or more, or fewer --microbatches"
            )
        if self.optimizer not in OPTIMIZERS:
            raise UnknownName("optimizer", self.optimizer, OPTIMIZERS)
        unknown = [variant for variant in self.fits or () if variant not in self.all_variants]
        if unknown:
            raise UsageError(
                f"--fits {unknown[0]!r} is not a strategy of this study: use {', '.join(self.all_variants)}"
            )

    @classmethod
    def machine_defaults(cls, given: Mapping[str, Any], *, quick: bool, note: Note) -> dict[str, Any]:
        """Choose the devices where none are given."""
        return {"devices": given.get("devices") or choose_devices(2)}

    @property
    def all_strategies(self) -> tuple[str, ...]:
        """The strategies, after the single-device baseline."""
        return ("serial", *self.strategies)

    @property
    def all_variants(self) -> tuple[str, ...]:
        """Every strategy without and with activation checkpointing: what is forecast."""
        return tuple(variant for strategy in self.all_strategies for variant in (strategy, f"{strategy}+recompute"))

    @property
    def variants(self) -> tuple[str, ...]:
        """Those that are run."""
        return tuple(
            variant
            for variant in self.all_variants
            if "+" not in variant or variant.partition("+")[0] in self.checkpointing
        )

    @property
    def fit_variants(self) -> tuple[str, ...]:
        """Variants whose largest number of layers is found by running."""
        if self.fits is not None or not self.quick:
            return self.all_variants if self.fits is None else self.fits
        few = {"data": "data", "tensor": "tensor+recompute"}
        return tuple(few[strategy] for strategy in self.strategies if strategy in few)

    @property
    def num_layers(self) -> int:
        """Layers of the model whose speed is measured."""
        return int(self.model.partition(":")[2])

    def plan(self, variant: str, num_layers: int | None = None, cuts: tuple[str, ...] = ()) -> Plan:
        """The plan of `serial`, `data`, `tensor+recompute`, … with the model's number of layers or another."""
        strategy, _, recompute = variant.partition("+")
        mesh = Mesh.parse("serial" if strategy == "serial" else f"{strategy}=2")
        layers = num_layers or self.num_layers
        plan = Plan(
            model=ModelSpec(name=f"gpt-layers:{layers}", sequence_length=self.sequence_length, seed=self.seed),
            batch=self.batch,
            mesh=mesh,
            microbatches=self.microbatches if mesh.pipeline > 1 else 1,
            cuts=cuts,
            devices=self.devices[: mesh.num_workers],
            optimizer=OptimizerSpec(name=self.optimizer),
            seed=self.seed,
            steps=self.steps,
            warmup=self.warmup,
            recompute="always" if recompute else "none",
        )
        return checkpoint_by_block(plan, [f"{_BLOCK}{number}" for number in range(layers)])
