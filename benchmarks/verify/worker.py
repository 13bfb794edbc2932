"""Run candidates one after the other in the processes of one torchrun: `worker.py JOBS.json`."""

from __future__ import annotations

import importlib
import json
import sys
import traceback
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from model import Setting


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    for job in json.loads(Path(sys.argv[1]).read_text()):
        module, _, function = job["script"].rpartition(".")
        run: Any = getattr(importlib.import_module(module), function)
        try:
            run(Setting(**job["setting"]), job["bug"], job["folder"])
        except Exception:
            print(job["folder"], traceback.format_exc(), file=sys.stderr)
            if job.get("alone"):
                raise
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
