"""Search terms of the field for the site's search: a hook of mkdocs.

A query for one of a page's terms finds that page first, whatever other pages mention it. Pages that most readers don't
look for (records of studies, decisions, generated references) come last.
"""

from __future__ import annotations

from typing import Any

TERMS: dict[str, tuple[str, ...]] = {
    "install.md": ("install", "pip", "requirements", "conda"),
    "faq.md": ("OOM", "out of memory", "troubleshooting", "hang", "error message"),
    "comparison.md": ("DeepSpeed", "Megatron", "torchtitan", "Accelerate", "PiPPy", "alternatives", "limitations"),
    "glossary.md": ("glossary", "MFU", "terminology", "sequence parallelism", "context parallelism"),
    "compare.md": (
        "FSDP",
        "ZeRO",
        "DDP",
        "all-reduce",
        "tensor parallelism",
        "data parallelism",
        "parity",
        "mesh",
        "batch norm",
        "dropout",
        "SyncBatchNorm",
        "random seed",
    ),
    "schedules.md": (
        "1F1B",
        "GPipe",
        "bubble",
        "zero bubble",
        "micro-batch",
        "activation checkpointing",
        "recomputation",
    ),
    "train.md": (
        "checkpoint",
        "resume",
        "gradient clipping",
        "gradient accumulation",
        "learning rate",
        "DataLoader",
        "dataset",
        "training loop",
        "wandb",
        "TensorBoard",
        "Hugging Face",
        "fine-tune",
    ),
    "how-to/my-own-model.md": ("own model", "custom model", "factory"),
    "how-to/mixed-precision.md": ("mixed precision", "bfloat16", "AMP", "autocast", "torch.compile", "TF32"),
    "how-to/multi-node.md": ("torchrun", "Slurm", "Kubernetes", "multi-node", "NCCL_SOCKET_IFNAME", "rendezvous"),
    "how-to/too-large.md": ("CPU offload", "does not fit", "large model", "largest batch"),
    "how-to/slow-job.md": (
        "slow",
        "bottleneck",
        "utilization",
        "performance",
        "profiler trace",
        "Kineto",
        "attach",
        "Trainer callback",
        "scaling efficiency",
        "waterfall",
    ),
    "how-to/wrong-loss.md": ("wrong loss", "verify", "diverges", "gradient mismatch"),
    "how-to/extend.md": ("plug-in", "entry points", "custom codec", "custom policy"),
    "results.md": ("timeline", "Perfetto", "Chrome trace", "kernel", "dashboard", "monitor"),
    "faults.md": ("worker failure", "SIGKILL", "watchdog", "crash", "restart"),
    "fabric.md": ("straggler", "NCCL", "nccl-tests", "bus bandwidth", "network", "packet loss", "latency"),
    "codecs.md": ("quantization", "compression", "fp8"),
    "split.md": (
        "load balance",
        "pipeline stages",
        "partition",
        "FLOPs",
        "MACs",
        "profiler",
        "torch.export",
        "graph",
        "control flow",
    ),
    "forecast.md": ("auto-parallel", "plan search", "simulator", "Chakra", "prediction", "cost model", "what-if"),
    "benchmarks.md": ("benchmarks", "accuracy of forecasts", "overhead"),
    "plans.md": ("plan.toml", "cluster.toml"),
}
LAST = (
    "decisions/",
    "studies/measured/",
    "capture-families",
    "capture-libraries",
    "engine-families",
    "verify-bugs",
    "json.md",
    "cli.md",
    "python.md",
)


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Attach the page's terms and its weight; the search plugin reads both from the page's metadata."""
    name = page.file.src_uri
    page.meta["tags"] = list(TERMS.get(name, ()))
    if name.startswith(LAST):
        page.meta["search"] = {"boost": 0.1}
    return markdown
