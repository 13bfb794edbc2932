"""The bugs of the verify benchmark, with the first wrong module and the cause of each; and the right runs."""

from __future__ import annotations

from dataclasses import dataclass

from model import Setting

PLAIN = Setting()


@dataclass(frozen=True, kw_only=True)
class Case:
    """One candidate script with its setting."""

    script: str
    """``file.function``."""
    bug: str
    """The bug that is switched on; empty for a right run."""
    setting: Setting = PLAIN
    module: tuple[str, ...] = ()
    """The first wrong module; several where the bug is between two."""
    cause: tuple[str, ...] = ()
    alone: bool = False
    """Whether it fails or hangs, so that it needs processes of its own."""

    ranks: int = 2
    stock: bool = False
    """Whether torch has the bug, and the script only uses it."""

    @property
    def name(self) -> str:
        """A name for files and tables."""
        return f"{self.script}: {self.bug or 'right'}"


ADAM = Setting(optimizer="adamw")
PADDED = Setting(padded=True)
DP, TP, PP = "data_parallel", "tensor_parallel", "pipeline"
LOSS = ("head",)

BUGS = [
    Case(script=f"{DP}.ddp", bug="loss divided by ranks", module=LOSS, cause=("loss scaled",)),
    Case(script=f"{DP}.ddp", bug="micro-batches not divided", module=LOSS, cause=("loss scaled",)),
    Case(script=f"{DP}.ddp", bug="micro-batches lost", module=LOSS, cause=("micro-batch lost",)),
    Case(script=f"{DP}.ddp", bug="no all-reduce", module=LOSS, cause=("missing all-reduce",)),
    Case(script=f"{DP}.ddp", bug="all-reduce twice", module=LOSS, cause=("all-reduce twice",)),
    Case(script=f"{DP}.ddp", bug="one all-reduce twice", module=("embed",), cause=("all-reduce twice",)),
    Case(
        script=f"{DP}.ddp",
        bug="clip before reduction",
        setting=Setting(clip=0.05),
        module=LOSS,
        cause=("gradient clipped before reduction",),
    ),
    Case(script=f"{DP}.ddp", bug="padding", setting=PADDED, module=("head", ""), cause=("padding counted",)),
    Case(script=f"{DP}.ddp", bug="mask shifted", setting=PADDED, module=("",), cause=("mask or position shifted",)),
    Case(script=f"{DP}.ddp", bug="positions shifted", module=("position",), cause=("mask or position shifted",)),
    Case(script=f"{DP}.ddp", bug="same samples", module=("",), cause=("different batch",)),
    Case(script=f"{DP}.ddp", bug="initial weights", module=LOSS, cause=("different initial weights",)),
    Case(script=f"{DP}.ddp", bug="stale buffer", module=("",), cause=("stale buffer",)),
    Case(
        script=f"{DP}.ddp",
        bug="eval mode",
        setting=Setting(dropout=0.2),
        module=("blocks.0.drop",),
        cause=("dropout masks differ",),
    ),
    Case(
        script=f"{DP}.ddp",
        bug="batch norm",
        setting=Setting(model="norm"),
        module=("1",),
        cause=("batch norm per replica",),
    ),
    Case(
        script=f"{DP}.ddp",
        bug="weight decay",
        setting=ADAM,
        module=("blocks.0.norm1",),
        cause=("weight decay on the wrong group",),
    ),
    Case(script=f"{DP}.ddp", bug="learning rate", setting=ADAM, module=("embed",), cause=("learning rate scaled",)),
    Case(script=f"{DP}.ddp", bug="parameter not updated", module=("embed",), cause=("parameter not updated",)),
    Case(script=f"{DP}.fsdp2", bug="sum instead of mean", module=LOSS, cause=("loss scaled", "all-reduce twice")),
    Case(script=f"{DP}.fsdp2", bug="loss scaled by ranks", module=LOSS, cause=("loss scaled",)),
    Case(script=f"{DP}.fsdp2", bug="block sums", module=("blocks.0.mlp.fc2",), cause=("all-reduce twice",)),
    Case(script=f"{DP}.fsdp2", bug="no reduce-scatter", module=LOSS, cause=("missing all-reduce", "missing gradient")),
    Case(
        script=f"{DP}.fsdp2",
        bug="local clipping norm",
        setting=Setting(clip=0.05),
        module=LOSS,
        cause=("wrong clipping norm", "gradient clipped before reduction"),
    ),
    Case(script=f"{DP}.fsdp2", bug="padding", setting=PADDED, module=("head", ""), cause=("padding counted",)),
    Case(
        script=f"{DP}.fsdp2",
        bug="weight decay",
        setting=ADAM,
        module=("blocks.0.norm1",),
        cause=("weight decay on the wrong group",),
    ),
    Case(script=f"{DP}.fsdp1", bug="loss scaled by ranks", module=LOSS, cause=("loss scaled",)),
    Case(script="accelerated.train", bug="backward without accelerator", module=LOSS, cause=("loss scaled",)),
    Case(script="accelerated.train", bug="model not prepared", module=LOSS, cause=("missing all-reduce",)),
    Case(script="accelerated.train", bug="loader not prepared", module=("",), cause=("different batch",)),
    Case(script="accelerated.train", bug="learning rate", module=("embed",), cause=("learning rate scaled",)),
    Case(script=f"{TP}.dtensor", bug="no all-reduce", module=("blocks.1.mlp.fc2",), cause=("missing all-reduce",)),
    Case(script=f"{TP}.dtensor", bug="fused projection", module=("blocks.0.attn.qkv",), cause=("wrong shard order",)),
    Case(
        script=f"{TP}.dtensor",
        bug="dropout seed",
        setting=Setting(dropout=0.2),
        module=("blocks.0.drop",),
        cause=("dropout seed per rank",),
    ),
    Case(script=f"{TP}.dtensor", bug="loss scaled by ranks", module=LOSS, cause=("loss scaled",)),
    Case(script=f"{TP}.megatron", bug="no all-reduce", module=("blocks.1.mlp.fc2",), cause=("missing all-reduce",)),
    Case(script=f"{TP}.megatron", bug="all-reduce twice", module=("blocks.1.attn.out",), cause=("all-reduce twice",)),
    Case(
        script=f"{TP}.megatron",
        bug="bias on every rank",
        module=("blocks.1.mlp.fc2",),
        cause=("bias added on every rank",),
    ),
    Case(script=f"{TP}.megatron", bug="fused projection", module=("blocks.1.attn.qkv",), cause=("wrong shard order",)),
    Case(script=f"{TP}.megatron", bug="swapped shards", module=("blocks.1.mlp.fc1",), cause=("wrong shard order",)),
    Case(
        script=f"{TP}.megatron",
        bug="no backward all-reduce",
        module=("blocks.1.mlp.fc1",),
        cause=("missing all-reduce",),
    ),
    Case(script=f"{TP}.megatron", bug="positions shifted", module=("position",), cause=("mask or position shifted",)),
    Case(
        script=f"{TP}.megatron",
        bug="sharded gradients averaged",
        module=("blocks.1.mlp.fc1",),
        cause=("loss scaled", "missing all-reduce"),
    ),
    Case(script=f"{PP}.text", bug="gradients not scaled", module=LOSS, cause=("loss scaled",)),
    Case(
        script=f"{PP}.text",
        bug="tied weights",
        setting=Setting(tied=True),
        module=("embed",),
        cause=("tied weights not summed",),
    ),
    Case(script=f"{PP}.text", bug="detached stage", module=("blocks.1", "blocks.1.norm1"), cause=("missing gradient",)),
    Case(
        script=f"{PP}.slices",
        bug="dynamic shapes",
        stock=True,
        setting=Setting(model="norm"),
        module=("1",),
        cause=("batch norm per replica", "stale buffer"),
    ),
    Case(
        script=f"{PP}.slices",
        bug="smaller batch",
        stock=True,
        setting=Setting(model="stack", forward_only=True, batch=4),
        module=("3", "3.0"),
        cause=("rows corrupted between stages",),
    ),
    Case(
        script=f"{PP}.replicated",
        bug="zbv with ddp",
        setting=Setting(model="stack"),
        module=("4",),
        cause=("missing all-reduce",),
        ranks=4,
        stock=True,
    ),
    Case(
        script=f"{PP}.slices",
        bug="zbv reentrant checkpoint",
        setting=Setting(model="stack"),
        module=("4",),
        cause=("reentrant checkpoint in a split backward",),
        alone=True,
        stock=True,
    ),
    Case(
        script=f"{PP}.slices",
        bug="zbv forward only",
        setting=Setting(model="stack", forward_only=True),
        module=(),
        cause=("schedule without forward-only mode",),
        alone=True,
        stock=True,
    ),
    Case(
        script=f"{PP}.slices",
        bug="second step with ddp",
        setting=Setting(model="stack"),
        module=("",),
        cause=("DDP around stages without static shapes",),
        alone=True,
        stock=True,
    ),
    Case(
        script=f"{PP}.slices",
        bug="stage raises",
        setting=Setting(model="stack"),
        module=("4",),
        cause=("exception in the step",),
        alone=True,
        stock=True,
    ),
    Case(
        script=f"{PP}.traced",
        bug="tied weights",
        stock=True,
        setting=Setting(tied=True),
        module=("embed",),
        cause=("tied weights not summed",),
    ),
    Case(
        script=f"{PP}.traced",
        bug="dropout baked in",
        stock=True,
        setting=Setting(dropout=0.2),
        module=("blocks.0.drop",),
        cause=("train or eval mode", "dropout masks differ"),
    ),
]

SCRIPTS = {
    f"{DP}.ddp": ("clip", "padded", "", "tied", "adamw"),
    f"{DP}.fsdp2": ("clip", "padded", "", "tied", "adamw"),
    f"{DP}.fsdp1": ("", "padded", "", "", ""),
    "accelerated.train": ("clip", "", "", "", ""),
    f"{TP}.dtensor": ("", "padded", "dropout", "", "adamw"),
    f"{TP}.sequence": ("", "padded", "dropout", "", "adamw"),
    f"{TP}.megatron": ("", "padded", "dropout", "", "adamw"),
    f"{PP}.text": ("", "", "", "tied", "adamw"),
    f"{PP}.slices": ("stack",) * 5,
    f"{PP}.traced": ("", "", "", "", "adamw"),
}


def _right(script: str, seed: int, dtype: str) -> Case:
    feature = SCRIPTS[script][seed]
    setting = Setting(
        model="stack" if feature == "stack" else "text",
        seed=seed,
        dtype=dtype,
        tied=feature == "tied",
        dropout=0.2 if feature == "dropout" else 0.0,
        padded=feature == "padded",
        clip=0.05 if feature == "clip" else 0.0,
        optimizer="adamw" if feature == "adamw" else "sgd",
    )
    return Case(script=script, bug="", setting=setting)


RIGHT = [
    _right(script, seed, dtype)
    for script in SCRIPTS
    for dtype in ("float32", "bfloat16", "float16")
    for seed in range(5)
]
