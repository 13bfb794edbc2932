"""``stagewright train`` on data of one's own: the losses of one device, and each replica reads its share."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import os
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3)), (torch.ones(4, 8),)

class Points(Dataset):
    def __init__(self, count, seed):
        generator = torch.Generator().manual_seed(seed)
        self.x = torch.randn(count, 8, generator=generator)
        self.y = self.x[:, :3].argmax(1)
    def __len__(self): return len(self.y)
    def __getitem__(self, index):
        with open(f"reads-{os.getpid()}.txt", "a") as file: print(index, file=file)
        return self.x[index], self.y[index]

def data(): return DataLoader(Points(64, 0), batch_size=16), Points(20, 1)
"""


@pytest.mark.slow
def test_data_parallel_training_is_that_of_one_device(tmp_path: Path) -> None:
    losses, reads = {}, {}
    for strategy, devices in (("serial", "cpu:0"), ("dp=2", "cpu:0,cpu:0")):
        folder = tmp_path / strategy
        folder.mkdir()
        (folder / "own.py").write_text(SCRIPT)
        words = ["train", "own:net", "own:data", "--strategy", strategy, "--devices", devices, "--epochs", "2"]
        words += ["--lr", "0.05", "--lr-schedule", "linear", "--log", "csv", "--json"]
        done = subprocess.run(
            [sys.executable, "-m", "stagewright", *words], cwd=folder, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        (run,) = json.loads(done.stdout)["runs"]
        assert run["steps"] == 8  # the batch is the DataLoader's
        (log,) = folder.glob("runs/*/metrics.csv")
        rows = list(csv.DictReader(log.read_text(encoding="utf-8").splitlines()))
        losses[strategy] = [float(row["loss"]) for row in rows if row["loss"]]
        assert [float(row["learning_rate"]) for row in rows if row["loss"]] == pytest.approx(
            [0.05 * (8 - step) / 8 for step in range(8)]
        )
        reads[strategy] = max(len(path.read_text().splitlines()) for path in folder.glob("reads-*.txt"))
    assert losses["dp=2"] == pytest.approx(losses["serial"], rel=1e-5)
    assert losses["serial"][-1] < losses["serial"][0]
    assert reads["dp=2"] < reads["serial"] - 60  # of 2 × (64 + 20) samples it reads half; both also read examples
