"""Train torchvision's detectors, unmodified, on lists of samples, and verify each plan against one device.

    python benchmarks/detectors.py                                   # needs torchvision; its operators may be missing
    python benchmarks/detectors.py --only ssdlite320_mobilenet_v3_large --output detectors.json

A batch is a list of nine images of different sizes and a list of nine dictionaries with one to three objects each. Two
replicas get five and four samples, in micro-batches of two or three. Loss, outputs, all gradients, buffers and
parameter updates are compared. Times mean nothing. Exits with code 3 if a plan fails, or fails the parity check.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from importlib import metadata
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported

from libraries.detectors import SAMPLES
from libraries.torchvision_models import DETECTION
from record import write_record
from stagewright.engine.jobs.compare import run_plan
from stagewright.errors import RunTerminated, StagewrightError
from stagewright.spec.plan import Mesh, ModelSpec, Plan

PLANS: dict[str, dict[str, Any]] = {
    "serial": {"mesh": "serial", "microbatches": 3},
    "data": {"mesh": "data=2", "microbatches": 2},
    "FSDP": {"mesh": "data=2", "microbatches": 2, "shard": True},
    "inference": {"mesh": "data=2", "training": False},
}


def main() -> int:
    """Run all plans of all detectors and return the exit code."""
    names = [path.rpartition(".")[2] for path in DETECTION]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="NAME", choices=names, default=names, help="only these detectors")
    parser.add_argument("-o", "--output", type=Path, default=Path("detectors.json"))
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for name in options.only:
        rows.append({"name": name, "plans": {}})
        for plan, settings in PLANS.items():
            rows[-1]["plans"][plan] = verify(name, settings)
            print(name, plan, rows[-1]["plans"][plan], flush=True)
            write_record(options.output, {"torchvision": metadata.version("torchvision"), "models": rows})
    results = [result for row in rows for result in row["plans"].values()]
    return 3 if any(result["verdict"] != "equal" for result in results) else 0


def verify(name: str, settings: dict[str, Any]) -> dict[str, Any]:
    """Run one plan of one detector and check parity."""
    mesh = Mesh.parse(settings["mesh"])
    plan = Plan(
        model=ModelSpec(name=f"libraries.detectors:{name}"),
        batch=SAMPLES,
        mesh=mesh,
        steps=1,
        warmup=0,
        **{key: value for key, value in settings.items() if key != "mesh"},
    )
    with tempfile.TemporaryDirectory() as root:
        try:
            parity = run_plan(plan, root).to_dict()["equality"]
        except RunTerminated:
            raise
        except StagewrightError as error:
            return {"verdict": "failed", "reason": str(error).splitlines()[0]}
    largest = max(parity[kind] for kind in ("loss", "outputs", "gradients", "buffers", "updates"))
    verdict = "equal" if parity["equal"] else "differs"
    return {"verdict": verdict, "difference": largest, "tolerance": parity["tolerance"]}


if __name__ == "__main__":
    sys.exit(main())
