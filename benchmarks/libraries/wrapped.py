"""Models that a library or a user has changed: Lightning, PEFT adapters, parametrizations, hooks, quantized layers."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from families.family import Arguments, Family, tokens

__all__ = ["FAMILIES"]


def _floats(batch_size: int) -> Arguments:
    generator = torch.Generator().manual_seed(800 + batch_size)
    return (torch.randn(batch_size, 16, generator=generator),), {}


def _llama() -> nn.Module:
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=100,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        use_cache=False,
    )
    return transformers.LlamaForCausalLM(config)


def _layers() -> nn.Sequential:
    return nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(4)))


def _peft(method: str, **config: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        import peft

        model: nn.Module = peft.get_peft_model(_llama(), getattr(peft, method)(task_type="CAUSAL_LM", **config))
        return model

    return make


def _lightning() -> nn.Module:
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layers = _layers()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = self.layers(x)
            return result

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            x, y = batch
            return nn.functional.mse_loss(self(x), y)

    return Module()


def _parametrized(kind: str) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        model = _layers()
        for block in model:
            linear: Any = block[0]  # type: ignore[index]
            if kind == "weight":
                nn.utils.parametrizations.weight_norm(linear)
            elif kind == "spectral":
                nn.utils.parametrizations.spectral_norm(linear)
            elif kind == "orthogonal":
                nn.utils.parametrizations.orthogonal(linear)
            else:
                nn.utils.parametrize.register_parametrization(linear, "weight", _Symmetric())
        return model

    return make


class _Symmetric(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight.triu() + weight.triu(1).transpose(-1, -2)


def _hooked(kind: str) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        model = _layers()
        for block in model:
            if kind == "forward":
                block.register_forward_hook(lambda module, inputs, output: output * 1.5)
                block.register_forward_pre_hook(lambda module, inputs: (inputs[0] + 0.1,))
            else:
                block.register_full_backward_hook(_double)
        return model

    return make


def _double(module: nn.Module, inputs: Any, outputs: Any) -> tuple[torch.Tensor | None]:
    return (None if inputs[0] is None else inputs[0] * 2,)


class QuantizedLinear(nn.Module):
    """A frozen linear layer with 8-bit weights and a scale per row, as bitsandbytes stores them."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        scale = linear.weight.detach().abs().amax(1, keepdim=True) / 127
        self.weight = nn.Parameter((linear.weight.detach() / scale).round().to(torch.int8), requires_grad=False)
        self.register_buffer("scale", scale)
        self.bias = linear.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.weight.to(x.dtype) * self.scale, self.bias)


def _quantized() -> nn.Module:
    model = _layers()
    for block in model:
        block[0] = QuantizedLinear(block[0])  # type: ignore[index,assignment,arg-type]
    return model


def _quantized_lora() -> nn.Module:
    class Adapted(nn.Module):
        def __init__(self, linear: nn.Linear) -> None:
            super().__init__()
            self.base = QuantizedLinear(linear)
            self.base.bias.requires_grad_(False)
            self.down, self.up = nn.Linear(16, 2, bias=False), nn.Linear(2, 16, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = self.base(x) + self.up(self.down(x))
            return result

    return nn.Sequential(*(nn.Sequential(Adapted(nn.Linear(16, 16)), nn.Tanh()) for _ in range(4)))


def _plain(name: str, kind: str, make: Callable[[], nn.Module], remark: str = "") -> Family:
    return Family(name=name, group="changed models", model_class=kind, make=make, example=_floats, remark=remark)


FAMILIES: tuple[Family, ...] = (
    _plain("parametrize", "nn.utils.parametrize", _parametrized("symmetric")),
    _plain("weight-norm", "parametrizations.weight_norm", _parametrized("weight")),
    _plain("spectral-norm", "parametrizations.spectral_norm", _parametrized("spectral")),
    _plain("orthogonal", "parametrizations.orthogonal", _parametrized("orthogonal")),
    _plain("forward-hooks", "register_forward_hook", _hooked("forward")),
    _plain("backward-hooks", "register_full_backward_hook", _hooked("backward")),
    _plain("quantized", "8-bit linear layers", _quantized),
    _plain("quantized-lora", "8-bit linear layers with adapters", _quantized_lora),
)
if importlib.util.find_spec("lightning") is not None:
    FAMILIES += (_plain("lightning", "LightningModule", _lightning),)
if importlib.util.find_spec("peft") is not None:
    _TARGETS = ["q_proj", "v_proj"]
    FAMILIES += tuple(
        Family(name=name, group="PEFT", model_class=method, make=_peft(method, **config), example=tokens())
        for name, method, config in (
            ("lora", "LoraConfig", {"r": 2, "target_modules": _TARGETS}),
            ("lora-embedding", "LoraConfig", {"r": 2, "target_modules": ["embed_tokens", "q_proj"]}),
            ("dora", "LoraConfig", {"r": 2, "target_modules": _TARGETS, "use_dora": True}),
            (
                "lora-modules-to-save",
                "LoraConfig",
                {"r": 2, "target_modules": _TARGETS, "modules_to_save": ["lm_head"]},
            ),
            ("vera", "VeraConfig", {"r": 4, "target_modules": ["q_proj"]}),
            ("ia3", "IA3Config", {"target_modules": ["k_proj", "down_proj"], "feedforward_modules": ["down_proj"]}),
            ("adalora", "AdaLoraConfig", {"target_modules": _TARGETS, "total_step": 10}),
            ("loha", "LoHaConfig", {"r": 2, "target_modules": _TARGETS}),
            ("oft", "OFTConfig", {"oft_block_size": 8, "target_modules": ["q_proj"]}),
            ("prefix-tuning", "PrefixTuningConfig", {"num_virtual_tokens": 4}),
            ("prompt-tuning", "PromptTuningConfig", {"num_virtual_tokens": 4}),
        )
    )
