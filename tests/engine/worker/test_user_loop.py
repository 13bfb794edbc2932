"""A loop of one's own under ``torchrun``: who fails is told, and nobody is left waiting."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from stagewright.cluster.device import Device, usable_cores
from stagewright.engine.worker.faults import activity
from stagewright.engine.worker.user_loop import UserLoop
from stagewright.engine.worker.watchdog import OUTSIDE
from stagewright.errors import UsageError

CORE = min(usable_cores())


def test_an_error_inside_keeps_its_type_and_says_where() -> None:
    loop = UserLoop(1, Device.parse("cpu:0"), 5.0)
    activity.begin("forward", step=3, stage=1, microbatch=2, shapes="(2, 16) float32")
    with pytest.raises(KeyError) as caught, loop.inside():
        raise KeyError("no such thing")
    assert caught.value.__notes__ == [
        "stagewright: worker 1 (cpu:0) failed: KeyError: 'no such thing'\n"
        "  at: step 3, stage 1, micro-batch 2, forward, shapes (2, 16) float32"
    ]
    assert activity.action == OUTSIDE


def test_wrong_input_says_all_in_its_sentence() -> None:
    with pytest.raises(UsageError) as caught, UserLoop(0, Device.parse("cpu:0"), 5.0).inside():
        raise UsageError("a batch is a tuple")
    assert not hasattr(caught.value, "__notes__")


def test_what_a_user_gives_is_taken_outside() -> None:
    loop = UserLoop(0, Device.parse("cpu:0"), 5.0)
    given = loop.outside(activity.action for _ in range(2))
    assert [(one, activity.action) for one in given] == [(OUTSIDE, "split batch"), (OUTSIDE, "split batch")]


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("raise", rf"worker 1 \(cpu:{CORE}\) failed: KeyError: 'no such thing'"),
        pytest.param(
            "hang", rf"worker 1 \(cpu:{CORE}\) hangs: no worker has made progress for \d+ s", marks=pytest.mark.slow
        ),
    ],
)
def test_under_torchrun(how: str, message: str, tmp_path: Path) -> None:
    """The second worker fails in its third step: both end, and the message has its stage, micro-batch and shapes."""
    (tmp_path / "script.py").write_text(SCRIPT.replace("cpu:0", f"cpu:{CORE}"))
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "script.py"]
    done = subprocess.run(
        words, capture_output=True, text=True, timeout=240, cwd=tmp_path, env={**os.environ, "HOW": how}
    )
    ended_s = time.time() - float((tmp_path / "failing").read_text())
    assert done.returncode == 1
    assert re.search(f"stagewright: {message}", done.stderr)
    assert "at: step 2, stage 1, micro-batch 1, forward, shapes (2, 8) float32" in done.stderr
    assert "in forward" in done.stderr
    assert ended_s < 90  # not the minutes of torch's own time limits, nor the 1000 s of the one that hangs


SCRIPT = """
import os
import time

import torch
from torch import nn
from stagewright.engine.parallel.parallelize import parallelize
from stagewright.spec.plan import Mesh, ModelSpec, Plan


class Fragile(nn.Linear):
    failing = False
    calls = 0

    def forward(self, x):
        if Fragile.failing:
            self.calls += 1
            if self.calls == 2:
                with open("failing", "w") as file:
                    file.write(str(time.time()))
                if os.environ["HOW"] == "raise":
                    raise KeyError("no such thing")
                time.sleep(1000)
        return super().forward(x)


model = nn.Sequential(nn.Linear(8, 8), Fragile(8, 4))
batch = (torch.randn(8, 8), torch.randint(0, 4, (8,)))
plan = Plan(
    model=ModelSpec(name="mine"),
    batch=8,
    mesh=Mesh(pipeline=2),
    microbatches=4,
    cuts=("0",),
    units="leaf",
    devices=("cpu:0", "cpu:0"),
)
hang_s = 12 if os.environ["HOW"] == "hang" else 120  # a busy machine may stand still for some seconds
trainer = parallelize(
    model, batch, plan=plan, loss=nn.functional.cross_entropy, optimizer=torch.optim.SGD, hang_s=hang_s
)
for number in range(4):
    Fragile.failing = number == 2
    trainer.step(batch)
"""
