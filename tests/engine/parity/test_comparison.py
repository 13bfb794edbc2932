"""What a proof notices, and its settings."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from stagewright.engine.jobs import measure as job
from stagewright.engine.parity.comparison import Equality, Reference, compare_with, full_precision
from stagewright.report.tables.parity_note import unequal_sentence
from stagewright.spec.plan import Mesh, ModelSpec, Plan


def allow_by_product() -> None:
    torch.backends.cuda.matmul.fp32_precision = "tf32"


def refuse_by_convolution() -> None:
    torch.backends.cudnn.conv.fp32_precision = "ieee"


WAYS: dict[str, Callable[[], None]] = {
    "not at all": lambda: None,
    "older": lambda: torch.set_float32_matmul_precision("medium"),
    "newer": allow_by_product,
    "newer, of one kind": refuse_by_convolution,
}


def told() -> list[object]:
    """What is set, in both of torch's ways; it refuses to tell the older one where they are mixed."""
    newer = (torch.backends.cuda.matmul, torch.backends.cudnn.conv, torch.backends.cudnn.rnn)
    found: list[object] = [one.fp32_precision == "tf32" for one in newer]
    for older in (torch.get_float32_matmul_precision, lambda: torch.backends.cudnn.allow_tf32):
        try:
            found.append(older())
        except RuntimeError:
            found.append("mixed")
    return found


@pytest.fixture
def settings() -> Iterator[None]:
    """As a process begins, before and after."""
    yield
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = True


@pytest.mark.parametrize("way", WAYS)
def test_a_proof_uses_no_tf32_and_leaves_what_was_allowed(way: str, settings: None) -> None:
    WAYS[way]()
    before = told()
    with full_precision():
        assert told()[:3] == [False, False, False]
    assert told() == before


ONE, NAN = torch.ones(2), torch.tensor([float("nan"), 1.0])
SERIAL = Reference(
    loss=1.0,
    loss_size=1.0,
    gradients={"a.weight": ONE, "b.weight": ONE},
    buffers={"a.mean": ONE, "a.scale": ONE},
    changed=frozenset({"a.mean"}),
    outputs=[[ONE, ONE], [ONE, ONE]],
)
SAME: dict[str, Any] = {
    "gradients": SERIAL.gradients,
    "buffers": {"a.mean": ONE},  # the other is the same before and after: a stage need not have it
    "outputs": {0: [ONE, ONE], 1: [ONE, ONE]},
}


@pytest.fixture(scope="module")
def alone() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("found", "worst"),
    [
        ({}, None),
        ({"gradients": {"a.weight": ONE}}, "gradient of b.weight (no worker has one)"),
        ({"gradients": {**SERIAL.gradients, "c.weight": 0 * ONE}}, "gradient of c.weight (serial has none)"),
        ({"gradients": {**SERIAL.gradients, "b.weight": NAN}}, "gradient of b.weight"),
        ({"buffers": {}}, "buffer of a.mean (no worker has one)"),
        ({"buffers": {"a.mean": 2 * ONE}}, "buffer of a.mean"),
        ({"outputs": {0: [ONE, ONE]}}, "result 0 of micro-batch 1 (no worker has one)"),
        ({"outputs": {0: [ONE, ONE], 1: [ONE]}}, "result 1 of micro-batch 1 (no worker has one)"),
        ({"outputs": {0: [ONE, ONE], 1: [ONE, ONE, ONE]}}, "result 2 of micro-batch 1 (serial has none)"),
    ],
)
def test_what_is_missing_or_no_number_is_not_equal(found: dict[str, Any], worst: str | None, alone: None) -> None:
    equality = compare_with(SERIAL, loss=1.0, tolerance=1e-5, device=torch.device("cpu"), **{**SAME, **found})
    assert equality.equal == (worst is None)
    if worst is not None:
        assert equality.worst == worst
        assert f"NOT equal to serial: {worst}" in unequal_sentence("data", equality.to_dict())


def test_a_number_where_serial_has_none(alone: None) -> None:
    serial = dataclasses.replace(SERIAL, gradients={"a.weight": NAN})
    rest = {**SAME, "loss": 1.0, "tolerance": 1e-5, "device": torch.device("cpu")}
    assert compare_with(serial, **{**rest, "gradients": {"a.weight": NAN}}).equal
    assert not compare_with(serial, **{**rest, "gradients": {"a.weight": ONE}}).equal


def compared(expected: torch.Tensor, found: torch.Tensor, **serial: Any) -> Equality:
    """Two results of one model, everything else being the same."""
    reference = Reference(loss=1.0, loss_size=1.0, outputs=[[expected]], **serial)
    rest: dict[str, Any] = {"loss": 1.0, "gradients": {}, "buffers": {}, "tolerance": 1e-5}
    return compare_with(reference, outputs={0: [found]}, device=torch.device("cpu"), **rest)


@pytest.mark.parametrize("mark", [-math.inf, torch.finfo(torch.float32).min])
def test_marks_of_what_is_masked_hide_no_difference(mark: float, alone: None) -> None:
    serial = torch.tensor([mark, 1.0, 2.0])
    assert compared(serial, serial.clone()).equal
    assert not compared(serial, torch.tensor([mark, 2.0, 4.0])).equal


def test_imaginary_parts_types_and_counts_are_compared(alone: None) -> None:
    waves = torch.tensor([1 + 2j, 3 - 1j])
    assert compared(waves, waves.clone()).equal
    assert not compared(waves, waves.conj()).equal
    assert not compared(ONE, ONE.double()).equal
    count = torch.tensor(450_000)
    assert compared(count, count.clone()).equal
    assert not compared(count, count + 1).equal


def test_what_rounding_moves_is_allowed_for_that_tensor_alone_and_not_without_end(alone: None) -> None:
    sways = {"result 0 of micro-batch 0": 0.05}
    assert compared(ONE, 1.04 * ONE, sways=sways).equal
    assert compared(ONE, 1.04 * ONE, sways=sways).tolerance == pytest.approx(0.05)
    assert not compared(ONE, 1.06 * ONE, sways=sways).equal
    assert not compared(ONE, 1.04 * ONE, sways={"gradient of a": 0.05}).equal
    assert not compared(ONE, 1.5 * ONE, sways={"result 0 of micro-batch 0": math.inf}).equal


def test_losses_that_add_up_to_nothing_are_measured_by_their_parts(alone: None) -> None:
    rest: dict[str, Any] = {"gradients": {}, "buffers": {}, "outputs": {}, "device": torch.device("cpu")}
    serial = Reference(loss=1e-7, loss_size=2.0)
    assert compare_with(serial, loss=3e-7, tolerance=1e-5, **rest).equal
    assert not compare_with(serial, loss=1e-3, tolerance=1e-5, **rest).equal


def test_a_worker_without_a_gradient_is_not_equal_whatever_the_others_have(alone: None) -> None:
    rest = {**SAME, "loss": 1.0, "tolerance": 1e-5, "device": torch.device("cpu")}
    assert compare_with(SERIAL, **rest, trained={"a.weight", "b.weight", "c.weight"}).equal
    found = compare_with(SERIAL, **{**rest, "gradients": {"a.weight": ONE}}, trained={"b.weight"})
    assert (found.equal, found.worst) == (False, "gradient of b.weight (a worker has none)")


@pytest.mark.parametrize(("data", "num_steps"), [(1, 2), (2, 3)])
@pytest.mark.parametrize("spoilt", [False, True])
def test_later_steps_are_compared_too(
    data: int, num_steps: int, spoilt: bool, alone: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sums that are right at first, as of buckets that are made anew; torch's are after the second step."""
    steps: list[int] = []
    replica = SimpleNamespace(
        plan=Plan(model=ModelSpec(name="made"), batch=2, mesh=Mesh(data=data)),
        context=SimpleNamespace(torch_device=torch.device("cpu"), data=0),
        codecs=None,
        buffers=lambda: {"a.mean": ONE.clone()},
        zero_gradients=lambda: None,
        train_step=lambda batch, keep_outputs: steps.append(1) or SimpleNamespace(outputs=[]),
        total_loss=lambda outcome: 1.0,
        trained=dict,
        full_gradients=lambda: {
            "a.weight": ONE,
            "b.weight": ONE * (2 if spoilt and len(steps) == num_steps else 1),
        },
    )
    monkeypatch.setattr(job, "_placed", lambda replica, outputs: SAME["outputs"])
    monkeypatch.setattr(job, "compare_updates", lambda *_: (0.0, "nothing"))
    found = job.prove(replica, None, SERIAL)  # type: ignore[arg-type]
    assert (len(steps), found.equal) == (num_steps, not spoilt)
    assert not spoilt or found.worst == "gradient of b.weight"


@pytest.mark.parametrize("spoilt", [False, True])
def test_the_stream_that_inference_times_is_compared(
    spoilt: bool, alone: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Right in its first round, wrong in its second."""
    results = [ONE, ONE, ONE, ONE * (2 if spoilt else 1)]
    replica = SimpleNamespace(
        plan=Plan(model=ModelSpec(name="made"), batch=2, training=False, microbatches=2),
        context=SimpleNamespace(torch_device=torch.device("cpu"), data=0),
        codecs=None,
        buffers=dict,
        zero_gradients=lambda: None,
        infer=lambda batch: SimpleNamespace(outputs=[ONE, ONE]),
        stream=lambda batch, repeats: iter(results),
        total_loss=lambda outcome: 1.0,
    )
    monkeypatch.setattr(job, "_placed", lambda replica, outputs: {at: [one] for at, one in enumerate(outputs)})
    serial = Reference(loss=1.0, loss_size=1.0, outputs=[[ONE], [ONE]])
    assert job.prove(replica, None, serial).equal != spoilt  # type: ignore[arg-type]
