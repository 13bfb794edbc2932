"""The tracker's numbers, byte for byte, on models whose memory can be counted by hand."""

from __future__ import annotations

import copy
import gc
import mmap
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from stagewright.engine.pipeline.activation_checkpointing import CheckpointedForward
from stagewright.engine.worker import memory
from stagewright.engine.worker.memory import MemoryTracker, process_peak_bytes, reset_process_peak
from stagewright.errors import RunError
from stagewright.graph import capture
from stagewright.runs.result import MemoryUse

BATCH, IN, HIDDEN, OUT = 5, 8, 16, 4
FLOAT_BYTES = 4
PARAMETERS = (IN * HIDDEN + HIDDEN + HIDDEN * OUT + OUT) * FLOAT_BYTES
ACTIVATIONS = (BATCH * IN + BATCH * HIDDEN) * FLOAT_BYTES  # the input, and tanh's output, which two operations keep


def make(limit_bytes: int | None = None, momentum: float = 0.0) -> tuple[nn.Module, Any, MemoryTracker]:
    model = nn.Sequential(nn.Linear(IN, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, OUT))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum)
    tracker = MemoryTracker(worker=1, limit_bytes=limit_bytes)
    tracker.follow_module(model)
    tracker.follow_optimizer(optimizer)
    return model, optimizer, tracker


def test_a_step_by_hand() -> None:
    model, optimizer, tracker = make(momentum=0.9)
    with tracker.tracking():
        assert tracker.report().current == MemoryUse(parameters=PARAMETERS)
        with tracker.forward():
            output = model(torch.randn(BATCH, IN))
        assert tracker.report().current == MemoryUse(parameters=PARAMETERS, activations=ACTIVATIONS)
        output.sum().backward()
        assert tracker.report().current == MemoryUse(parameters=PARAMETERS, gradients=PARAMETERS)
        optimizer.step()
        tracker.update()
        everything = MemoryUse(parameters=PARAMETERS, gradients=PARAMETERS, optimizer=PARAMETERS)
        assert tracker.report().current == everything
        optimizer.zero_grad()
    report = tracker.report()
    assert report.current == MemoryUse(parameters=PARAMETERS, optimizer=PARAMETERS)
    assert report.peak == everything
    assert report.peak.total_bytes == report.peak_memory_bytes == 3 * PARAMETERS
    assert report.to_dict()["peak"]["optimizer"] == PARAMETERS
    assert report.allocator_peak_bytes is None


def test_the_peak_inside_a_backward() -> None:
    # When the last layer's gradients are there and the first layer's are not, the input is still kept.
    model = nn.Sequential(nn.Linear(IN, 2, bias=False), nn.Linear(2, 64, bias=False))
    tracker = MemoryTracker(worker=0)
    tracker.follow_module(model)
    with tracker.tracking():
        with tracker.forward():
            loss = model(torch.randn(BATCH, IN)).sum()
        loss.backward()
    last = 2 * 64 * FLOAT_BYTES
    first = IN * 2 * FLOAT_BYTES
    peak = tracker.report().peak
    assert peak.gradients in (last, last + first)
    assert peak.total_bytes >= first + last + last + BATCH * IN * FLOAT_BYTES


@pytest.mark.parametrize("num_microbatches", [1, 2, 4])
def test_holding_micro_batches_as_gpipe_does(num_microbatches: int) -> None:
    model, _, tracker = make()
    with tracker.tracking():
        losses = []
        for _ in range(num_microbatches):
            with tracker.forward():
                losses.append(model(torch.randn(20 * BATCH, IN)).sum())
        assert tracker.report().current.activations == num_microbatches * 20 * ACTIVATIONS
        for left in reversed(range(num_microbatches)):
            losses.pop().backward()
            assert tracker.report().current.activations == left * 20 * ACTIVATIONS
    peak = tracker.report().peak
    assert peak.activations == num_microbatches * 20 * ACTIVATIONS
    # The last layer's gradients come while tanh still holds its output.
    assert peak.gradients == (HIDDEN * OUT + OUT) * FLOAT_BYTES


def test_one_forward_one_backward_holds_one() -> None:
    model, _, tracker = make()
    with tracker.tracking():
        for _ in range(4):
            with tracker.forward():
                loss = model(torch.randn(BATCH, IN)).sum()
            loss.backward()
            assert tracker.report().current.activations == 0
    assert tracker.report().peak.activations == ACTIVATIONS


def test_what_is_dropped_without_a_backward_is_given_back() -> None:
    model, _, tracker = make()
    with tracker.tracking():
        with tracker.forward():
            output = model(torch.randn(BATCH, IN))
        assert tracker.report().current.activations == ACTIVATIONS
    del output  # after the tracked step
    gc.collect()
    assert tracker.report().current.activations == 0
    assert not tracker._saved


def test_storages_count_once_and_whole() -> None:
    tracker = MemoryTracker(worker=0)
    base = torch.randn(10, 10, requires_grad=True)
    with tracker.tracking():
        with tracker.forward():
            doubled = base * 2
            results = [(doubled[at] ** 2).sum() for at in range(3)]  # three rows of one storage
        assert tracker.report().current.activations == 100 * FLOAT_BYTES
        results.pop()
        results.pop()
        assert tracker.report().current.activations == 100 * FLOAT_BYTES
        results.pop()
        assert tracker.report().current.activations == 0


def test_parameters_and_buffers_are_not_activations() -> None:
    model = nn.Sequential(nn.Linear(IN, HIDDEN), nn.BatchNorm1d(HIDDEN))
    tracker = MemoryTracker(worker=0)
    tracker.follow_module(model)
    with tracker.tracking():
        with tracker.forward():
            loss = model(torch.randn(BATCH, IN)).sum()
        use = tracker.report().current
        assert use.buffers == 2 * HIDDEN * FLOAT_BYTES + 8
        assert use.parameters == (IN * HIDDEN + 3 * HIDDEN) * FLOAT_BYTES
        # the input; the linear layer's output and the mean and deviation of each channel
        assert use.activations == (BATCH * IN + BATCH * HIDDEN + 2 * HIDDEN) * FLOAT_BYTES
        del loss


def test_tied_parameters_and_two_stages_count_once() -> None:
    shared = nn.Linear(IN, IN)
    tracker = MemoryTracker(worker=0)
    tracker.follow_module(nn.Sequential(shared))
    tracker.follow_module(nn.Sequential(shared, nn.Linear(IN, 1, bias=False)))
    with tracker.tracking():
        pass
    assert tracker.report().peak == MemoryUse(parameters=(IN * IN + IN + IN) * FLOAT_BYTES)


def test_other_tensors_are_followed() -> None:
    model, _, tracker = make()
    received = torch.randn(BATCH, IN)
    tracker.follow("other", lambda: [received, received.view(-1)])
    with tracker.tracking():
        with tracker.forward():
            output = model(received)
        use = tracker.report().current
    assert use.other == BATCH * IN * FLOAT_BYTES
    assert use.activations == ACTIVATIONS - use.other
    del output


def test_recomputation_is_seen_while_it_lasts() -> None:
    model, _, tracker = make()
    graph = capture(model, (torch.randn(3, IN),), units=["0", "1", "2"])
    (stage,) = graph.stages([])
    forward = CheckpointedForward(
        stage, policy="always", index=0, num_microbatches=4, recompute_context=tracker.forward
    )
    num_samples = 20 * BATCH
    inputs = num_samples * IN * FLOAT_BYTES
    with tracker.tracking():
        outputs = []
        for at in range(4):
            with tracker.forward():
                outputs.append(forward((torch.randn(num_samples, IN),), at)[0])
            assert tracker.report().current.activations == (at + 1) * inputs
        for left in reversed(range(4)):
            outputs.pop().sum().backward()
            assert tracker.report().current.activations == left * inputs
    # Three micro-batches' inputs, and everything of the one that is recomputed.
    assert tracker.report().peak.activations == 3 * inputs + 20 * ACTIVATIONS
    assert not tracker._saved


def test_gradients_are_the_same_in_a_tracked_step() -> None:
    model, _, tracker = make()
    plain = copy.deepcopy(model)
    x = torch.randn(BATCH, IN)
    plain(x).square().sum().backward()
    with tracker.tracking():
        with tracker.forward():
            loss = model(x).square().sum()
        loss.backward()
    for a, b in zip(plain.parameters(), model.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)


def test_a_change_in_place_is_still_refused() -> None:
    tracker = MemoryTracker(worker=0)
    x = torch.ones(3, requires_grad=True)
    with tracker.tracking(), tracker.forward():
        y = x * 2
        loss = (y * y).sum()
    y.detach().add_(1)
    with pytest.raises(RuntimeError, match="changed in place"):
        loss.backward()


def test_other_steps_cost_nothing() -> None:
    model, _, tracker = make()
    with tracker.forward():
        assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
        output = model(torch.randn(BATCH, IN))
    tracker.update()
    assert tracker.report().current == MemoryUse()
    with tracker.tracking():
        assert all(one._post_accumulate_grad_hooks for one in model.parameters())
    assert not any(one._post_accumulate_grad_hooks for one in model.parameters())
    del output


def test_a_limit_names_the_worker_and_what_filled_it() -> None:
    model, _, tracker = make(limit_bytes=PARAMETERS + 2 * ACTIVATIONS)
    held = []
    with tracker.tracking():
        for _ in range(2):
            with tracker.forward():
                held.append(model(torch.randn(BATCH, IN)))
        with pytest.raises(RunError) as error, tracker.forward():
            held.append(model(torch.randn(BATCH, IN)))
    assert str(error.value) == (
        "worker 1 is out of memory: 1.92 KiB needed, 1.77 KiB allowed; activations 1.09 KiB, parameters 848 B; "
        "use more micro-batches, activation checkpointing (--recompute always) or more stages"
    )
    assert error.value.exit_code == 1
    assert len(held) == 2
    del error  # its traceback holds what was computed
    gc.collect()
    assert tracker.report().current.activations == 2 * ACTIVATIONS  # the refused one is gone


def test_sizes_that_read_the_same_are_told_in_bytes() -> None:
    _, _, tracker = make(limit_bytes=1 << 20)
    with pytest.raises(RunError, match="1,048,577 bytes needed, 1,048,576 allowed"):
        tracker._check((1 << 20) + 1)


def test_an_allocation_that_the_device_refuses_is_told_like_a_limit() -> None:
    _, _, tracker = make()
    with (
        tracker.tracking(),
        pytest.raises(RunError, match=r"worker 1 is out of memory: 2\.00 GiB more wanted on cuda:9; parameters 848 B"),
        tracker.explain_oom(),
    ):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 9 has a total capacity of …")
    untouched = MemoryTracker(worker=1, limit_bytes=2**20)
    text = r"out of memory: more wanted on \S+( device)? \(1\.00 MiB allowed\); use more micro-batches"
    with pytest.raises(RunError, match=text), untouched.explain_oom():
        raise torch.OutOfMemoryError("no more")


def test_a_limit_holds_in_backward_and_from_the_start() -> None:
    model, _, tracker = make(limit_bytes=PARAMETERS + ACTIVATIONS)
    with tracker.tracking():
        with tracker.forward():
            loss = model(torch.randn(BATCH, IN)).sum()
        with pytest.raises(RunError, match=r"worker 1 is out of memory: .*gradients"):
            loss.backward()
    _, _, small = make(limit_bytes=PARAMETERS - 1)
    with pytest.raises(RunError, match="847 B allowed; parameters 848 B"), small.tracking():
        pass
    assert not small.active


def test_peaks_start_again() -> None:
    model, _, tracker = make()
    with tracker.tracking():
        with tracker.forward():
            loss = model(torch.randn(BATCH, IN)).sum()
        loss.backward()
        tracker.reset_peak()
    assert tracker.report().peak == MemoryUse(parameters=PARAMETERS, gradients=PARAMETERS)


def test_the_process() -> None:
    large = mmap.mmap(-1, 200_000_000)  # not a tensor: torch's allocator may keep what is freed
    large[:: mmap.PAGESIZE] = bytes(-(-len(large) // mmap.PAGESIZE))
    with_it = process_peak_bytes()
    assert with_it is not None
    assert with_it > 200_000_000
    large.close()
    if reset_process_peak():
        without = process_peak_bytes()
        assert without is not None
        assert without < with_it - 150_000_000


def test_the_process_where_the_system_has_no_proc(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(memory, "Path", lambda name: tmp_path / "none" / name.strip("/"))
    assert (process_peak_bytes() or 0) > 10_000_000
    assert not reset_process_peak()


def test_text() -> None:
    assert str(MemoryUse(parameters=2048, activations=1 << 30)) == "activations 1.00 GiB, parameters 2.00 KiB"
    assert str(MemoryUse()) == "nothing"


def test_an_inference_by_hand() -> None:
    """A layer's result is there while the next is made from it; the batch is another's, the result is held on."""
    model, _, tracker = make()
    batch = torch.randn(BATCH, IN)
    made = BATCH * HIDDEN * FLOAT_BYTES * 2  # the first layer's result and tanh's
    with tracker.tracking(), torch.no_grad(), tracker.count_allocations():
        model(batch)
    assert tracker.report().peak == MemoryUse(parameters=PARAMETERS, activations=made)
    assert tracker.report().current == MemoryUse(parameters=PARAMETERS)


def test_an_inference_is_held_to_its_limit() -> None:
    model, _, tracker = make(limit_bytes=PARAMETERS + BATCH * HIDDEN * FLOAT_BYTES)
    batch = torch.randn(BATCH, IN)
    told = r"worker 1 is out of memory: 1.45 KiB needed, 1.14 KiB allowed; parameters 848 B, activations 640 B"
    with pytest.raises(RunError, match=told), tracker.tracking(), torch.no_grad(), tracker.count_allocations():
        model(batch)
