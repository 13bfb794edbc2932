from __future__ import annotations

from typing import Any

import pytest
import torch

from stagewright import zoo
from stagewright.errors import UnknownName, UsageError
from stagewright.zoo.loss import logits_of

MILLIONS = {
    "mlp-mnist": 0.242762,
    "digits-vit": 0.136138,
    "deit-tiny": 5.7178,
    "deit-small": 22.051432,
    "deit-base": 86.569192,
    "mobilenet-v2": 3.504872,
    "resnet-50": 25.557032,
    "resnet-101": 44.54916,
    "roberta-base": 124.64717,
    "bert-minilm": 22.713986,
    "gpt2": 124.439808,
    "llama-tiny": 9.998592,
    "gpt-layers": 42.548224,
}


@pytest.mark.parametrize("name", zoo.names())
def test_parameters_and_shape_of_the_logits(name: str) -> None:
    with torch.device("meta"):
        model = zoo.load(name, batch=2)
    assert sum(one.numel() for one in model.module.parameters()) == round(MILLIONS[name] * 1e6)
    assert model.module.training
    assert model.description
    if model.objective == "next-token":  # decoders look into their masks, which "meta" does not have
        assert model.target.shape == (2, 128)
        return
    logits = logits_of(model.module.eval()(*[one.to("meta") for one in model.args]))
    assert logits.shape == (2, model.num_classes)
    assert model.target.shape == (2,)


def test_gradient_bytes_of_the_perceptron() -> None:
    model = zoo.load("mlp-mnist", batch=4)
    model.loss(model.module(*model.args), model.target).backward()
    sizes = {name: 0 for name, _ in model.module.named_children()}
    for name, parameter in model.module.named_parameters():
        assert parameter.grad is not None
        sizes[name.partition(".")[0]] += parameter.grad.nbytes
    assert sizes == {"fc1": 803840, "fc2": 131584, "fc3": 33024, "fc4": 2600}


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("deit-tiny", {"image_size": 32, "num_classes": 7}),
        ("mobilenet-v2", {"image_size": 64, "num_classes": 7}),
        ("digits-vit", {}),
        ("bert-minilm", {"sequence_length": 8, "num_classes": 7}),
        ("bert-minilm", {"sequence_length": 8, "padded": True}),
        ("gpt-layers:1", {"sequence_length": 8}),
        ("gpt-layers:2", {"sequence_length": 9, "padded": True}),
        ("llama-tiny", {"sequence_length": 8}),
    ],
)
def test_loss_and_gradients(name: str, options: dict[str, Any]) -> None:
    model = zoo.load(name, batch=2, **options)
    loss = model.loss(model.module(*model.args, **model.kwargs), model.target)
    loss.backward()
    assert loss.shape == ()
    # Random weights know nothing: the loss is near that of a uniform guess.
    choices = model.num_classes or getattr(model.inputs, "vocabulary_size", 0)
    uniform = torch.tensor(float(choices)).log().item()
    assert abs(loss.item() - uniform) < 0.5 * uniform
    assert all(one.grad is not None for one in model.module.parameters())


def test_number_of_layers() -> None:
    with torch.device("meta"):
        assert len(zoo.load("gpt-layers:5").module.transformer.h) == 5  # type: ignore[union-attr,arg-type]
        assert len(zoo.load("gpt-layers").module.transformer.h) == 12  # type: ignore[union-attr,arg-type]


def test_building_leaves_the_random_numbers_alone_and_repeats() -> None:
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    first = zoo.load("digits-vit", seed=1)
    assert torch.equal(torch.rand(3), expected)
    second, other = zoo.load("digits-vit", seed=1), zoo.load("digits-vit", seed=2)
    for name, value in first.module.state_dict().items():
        assert torch.equal(value, second.module.state_dict()[name])
    assert torch.equal(first.args[0], second.args[0])
    assert not torch.equal(first.args[0], other.args[0])
    weight = "classifier.weight"
    assert not torch.equal(first.module.state_dict()[weight], other.module.state_dict()[weight])


@pytest.mark.parametrize(
    ("name", "options"),
    [("mlp-mnist", {}), ("gpt-layers:1", {"sequence_length": 6}), ("bert-minilm", {"padded": True})],
)
def test_a_smaller_example_is_the_start_of_a_larger_one(name: str, options: dict[str, Any]) -> None:
    with torch.device("meta"):
        model = zoo.load(name, **options)
    small, large = model.example(3), model.example(5)
    assert torch.equal(small.args[0], large.args[0][:3])
    assert torch.equal(small.target, large.target[:3])
    assert large.args[0].shape[0] == 5
    for key, value in small.kwargs.items():
        assert torch.equal(value, large.kwargs[key][:3])


def test_padded_examples_are_masked_and_not_learned() -> None:
    with torch.device("meta"):
        model = zoo.load("gpt2", padded=True, sequence_length=10, batch=6)
    mask = model.kwargs["attention_mask"]
    assert 0 < int((mask == 0).sum()) < mask.numel() // 2
    assert torch.equal(model.target == -100, mask == 0)
    assert bool((model.args[0][mask == 0] == 50256).all())


def test_other_number_types() -> None:
    model = zoo.load("mlp-mnist", dtype="bfloat16", batch=2)
    assert model.args[0].dtype == torch.bfloat16
    assert model.module(*model.args).dtype == torch.bfloat16
    assert model.loss(model.module(*model.args), model.target).dtype == torch.float32


def test_batch_norm_of_mobilenet_keeps_a_memory() -> None:
    with torch.device("meta"):
        model = zoo.load("mobilenet-v2")
    momenta = {one.momentum for one in model.module.modules() if isinstance(one, torch.nn.BatchNorm2d)}
    assert momenta == {0.1}
    assert "0.997" in model.notes[0]


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("deit-small", {"sequence_length": 3}, "has no option sequence_length"),
        ("deit-small", {"image_size": 100}, "use image_size 96 or 112"),
        ("deit-small", {"image_size": 0}, "image_size must be an integer"),
        ("deit-small", {"batch": 0}, "at least 1 sample, not 0"),
        ("digits-vit", {"batch": 10**20}, "a batch of 100000000000000000000 samples takes "),
        ("bert-minilm", {"batch": 10**20}, "of memory available; use a smaller batch"),
        ("deit-small", {"dtype": "int8"}, "one of float32"),
        ("deit-small", {"seed": -1}, "the seed must be"),
        ("gpt2", {"sequence_length": 1025}, "at most 1024 tokens, not 1025"),
        ("roberta-base", {"sequence_length": 513}, "at most 512 tokens, not 513"),
        ("gpt2:3", {}, "fixed number of layers"),
        ("gpt-layers:0", {}, "from 1 to 10000"),
        ("gpt-layers:many", {}, "from 1 to 10000"),
    ],
)
def test_wrong_options(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        zoo.load(name, **options)


def test_an_unknown_model() -> None:
    with pytest.raises(UnknownName, match=r"did you mean 'resnet-50'.*hf:org/name"):
        zoo.load("resnet50")
