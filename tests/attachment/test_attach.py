"""``sw.attach()`` in this process: metrics of each step, profiled steps, and hooks that leave nothing behind."""

import gc
import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, dataloader

import stagewright as sw
from stagewright.attachment.attach import Attached
from stagewright.attachment.hooks import batch_size
from stagewright.attachment.summary import summarize
from stagewright.errors import UsageError
from stagewright.runs.run_folder import RunFolder
from stagewright.trace.breakdown import breakdown
from stagewright.trace.events import StepScheduling
from stagewright.trace.read import read_trace
from stagewright.trace.waterfall import explain_trace


@pytest.fixture
def recorded(tmp_path: Path) -> tuple[Attached, RunFolder]:
    """Twelve steps of a small model; step 6 sleeps while loading, step 7 saves, step 9 collects garbage."""

    class Slow(TensorDataset):
        def __getitem__(self, index: int) -> tuple[torch.Tensor, ...]:
            if index == 5 * 8:
                time.sleep(0.05)
            return super().__getitem__(index)

    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
    optimizers = [torch.optim.SGD(part.parameters(), lr=0.1) for part in (model[0], model[2])]
    data = DataLoader(Slow(torch.randn(96, 16), torch.randint(4, (96,))), batch_size=8)
    run = sw.attach(tmp_path, name="job", profile_steps=[4])
    for step, (x, y) in enumerate(data, start=1):
        nn.functional.cross_entropy(model(x), y).backward()
        if step == 7:
            torch.save(model.state_dict(), tmp_path / "model.pt")
        if step == 9:
            gc.collect()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    run.stop()
    assert run.path is not None
    return run, RunFolder.open(run.path)


def test_every_step_after_the_first_is_a_line_of_metrics(recorded: tuple[Attached, RunFolder]) -> None:
    _, folder = recorded

    lines = list(folder.metrics(0))

    assert [line["step"] for line in lines] == list(range(2, 13))  # one of two optimizers ends a step
    assert {line["samples"] for line in lines} == {8}
    assert [line["step"] for line in lines if line["profiled"]] == [4, 5, 6]
    loading = {line["step"]: line["loading_s"] for line in lines}
    assert loading[6] >= 0.05 > loading[7]
    assert [line["step"] for line in lines if line["checkpoint_s"] > 0] == [7]
    assert next(line for line in lines if line["step"] == 9)["garbage_collection_s"] > 0


@pytest.mark.skipif(sys.platform != "linux", reason="from Linux's scheduler statistics")
def test_profiled_steps_say_how_their_thread_was_scheduled(recorded: tuple[Attached, RunFolder]) -> None:
    _, folder = recorded

    scheduling = read_trace(folder).workers[0].scheduling
    seconds = {line["step"]: line["seconds"] for line in folder.metrics(0)}

    assert set(scheduling) == {4, 5, 6}
    assert all(found.cpu_s > 0 for found in scheduling.values())
    assert all(0 <= found.loading_runqueue_s <= found.runqueue_s for found in scheduling.values())
    blocked_s = {step: seconds[step] - found.cpu_s - found.runqueue_s for step, found in scheduling.items()}
    assert min(blocked_s.values()) < 0.02 < blocked_s[6]  # it slept for 50 ms


def test_damaged_scheduling_is_left_out(recorded: tuple[Attached, RunFolder]) -> None:
    _, folder = recorded
    path = next(folder.worker(0).path.glob("metrics*"))
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    lines[0] |= {"cpu_s": "much", "runqueue_s": 0.0}
    lines[1] |= {"cpu_s": 0.1, "runqueue_s": -1.0}
    lines[2] |= {"cpu_s": 0.1, "runqueue_s": 0.2, "loading_runqueue_s": None}
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))

    scheduling = read_trace(folder).workers[0].scheduling

    assert sorted(scheduling) == [4, 5, 6]
    assert scheduling[4] == StepScheduling(cpu_s=0.1, runqueue_s=0.2)


def test_the_parts_of_profiled_steps_add_up(recorded: tuple[Attached, RunFolder]) -> None:
    _, folder = recorded

    trace = read_trace(folder)

    assert trace.steps == (4, 5, 6)
    for step in trace.steps:
        (share,) = breakdown(trace, step)
        assert sum(share.parts().values()) == pytest.approx(share.step_s, rel=1e-6)
    explained = explain_trace(trace, 6)
    assert sum(row.share for row in explained.rows) == pytest.approx(1.0)
    assert next(row for row in explained.rows if row.name == "data loading").seconds >= 0.05
    assert "DataLoader" in explained.advice


def test_the_summary_counts_flops_of_matrix_products(recorded: tuple[Attached, RunFolder]) -> None:
    _, folder = recorded

    summary = summarize(folder)

    # Forward 2 × 8 × (16 × 32 + 32 × 4); backward as much for weights, and for the inputs of the second layer.
    assert summary.flops_per_step == 2 * 8 * (2 * (16 * 32 + 32 * 4) + 32 * 4)
    assert (summary.num_steps, summary.num_ranks, summary.mfu) == (12, 1, None)
    assert summary.step_s > 0
    result = folder.result()
    assert result is not None
    assert result.status == "done"
    assert result.extra["attached"]["num_steps"] == 12


def test_nothing_stays_behind(recorded: tuple[Attached, RunFolder]) -> None:
    run, folder = recorded

    assert dataloader._BaseDataLoaderIter.__next__.__module__ == dataloader.__name__
    assert torch.save.__module__ == "torch.serialization"
    assert not any(type(callback).__name__ == "_CollectionTimer" for callback in gc.callbacks)
    before = len(list(folder.metrics(0)))
    parameter = nn.Parameter(torch.ones(1))
    parameter.grad = torch.ones(1)
    torch.optim.SGD([parameter], lr=0.1).step()
    assert len(list(folder.metrics(0))) == before
    assert sw.attach(folder.path.parent) is not run
    sw.attach(folder.path.parent).stop()


def test_no_profile_ends_inside_a_span_that_it_has_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its end would be written to freed memory. Optimizers step in a span; the last profile ends in one of the user."""
    open_spans: list[set[str]] = []
    now: set[str] = set()
    spans, stop = torch.profiler.record_function, torch.profiler.profile.stop
    enter, leave = spans.__enter__, spans.__exit__

    def entered(span: Any) -> Any:
        now.add(span.name)
        return enter(span)

    def left(span: Any, *error: Any) -> None:
        leave(span, *error)
        now.discard(span.name)

    monkeypatch.setattr(spans, "__enter__", entered)
    monkeypatch.setattr(spans, "__exit__", left)
    monkeypatch.setattr(torch.profiler.profile, "stop", lambda self: (open_spans.append(set(now)), stop(self)))
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with spans("training"):  # began before any profile
        run = sw.attach(tmp_path, profile_steps=[2, 5, 8])
        for step in range(1, 10):
            with spans("step"):
                model(torch.randn(4, 8)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                if step == 9:
                    run.stop()
                    assert len(open_spans) == 2, "the third profile waits for the span"
    assert open_spans == [{"training"}] * 3
    assert (spans.__enter__, spans.__exit__) == (entered, left), "nothing stays behind"
    assert run.path is not None
    assert sorted(path.name for path in run.path.glob("workers/0/step-*")) == ["step-000002.json", "step-000005.json"]


def test_an_optimizer_that_steps_in_backward_is_profiled_until_backward_has_ended(tmp_path: Path) -> None:
    weight = nn.Parameter(torch.ones(4))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    weight.register_post_accumulate_grad_hook(lambda _: optimizer.step())
    run = sw.attach(tmp_path, profile_steps=[2, 6])
    for _ in range(12):
        (weight.square().sum()).backward()
        with torch.profiler.record_function("between two steps"):
            pass
        assert (run._profiler is None) == (run._step not in (1, 2, 3, 5, 6, 7))
    run.stop()
    assert run.path is not None
    assert len(list(run.path.glob("workers/0/step-*"))) == 2


def test_it_is_a_callback_of_trainers(tmp_path: Path) -> None:
    """As Hugging Face's CallbackHandler calls it: every event, with three values and keywords."""
    run = sw.attach(tmp_path)
    for name in ("on_init_end", "on_train_begin", "on_step_begin", "on_substep_end", "on_step_end", "on_save"):
        assert getattr(run, name)("args", "state", "control", model=None) is None
    run.on_log("args", "state", "control", logs={"loss": 0.5})
    assert run._loss == 0.5
    run.on_train_end("args", "state", "control")
    assert run._is_stopped
    assert run.state_dict() == {}
    assert run.state_dict.__code__ is not None, "Lightning compares the code of methods with that of its own callback"
    with pytest.raises(AttributeError):
        _ = run.unknown


def test_a_run_without_profiled_steps_says_so(tmp_path: Path) -> None:
    run = sw.attach(tmp_path, name="short", profile_steps=[100])
    parameter = nn.Parameter(torch.ones(1))
    parameter.grad = torch.ones(1)
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    for _ in range(3):
        optimizer.step()
    run.stop()
    assert run.path is not None

    with pytest.raises(UsageError, match="no profiled step yet"):
        read_trace(RunFolder.open(run.path))


def test_samples_and_tokens_of_a_batch() -> None:
    ids = torch.ones(4, 7, dtype=torch.long)
    assert batch_size({"input_ids": ids, "labels": ids}) == (4, 28)
    assert batch_size((torch.ones(5, 3, 2, 2), torch.ones(5, dtype=torch.long))) == (5, 0)
    assert batch_size(["text"]) == (0, 0)
