from __future__ import annotations

import sys
import textwrap
from pathlib import Path

import pytest
import torch

from stagewright import zoo
from stagewright.engine.parallel.model import capture_for
from stagewright.errors import UnknownName, UsageError
from stagewright.graph import capture
from stagewright.spec.plan import ModelSpec, Plan
from stagewright.zoo.loss import surrogate_loss

SOURCE = """
import torch
from torch import nn

class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.one = nn.Linear(4, 4)
    def forward(self, x, *, scale):
        return {"a": self.one(x) * scale, "b": torch.arange(3)}

def plain(): return nn.Linear(4, 2), (torch.arange(12.0).reshape(3, 4),)
def lone_tensor(): return nn.Linear(4, 2), torch.ones(3, 4)
def with_kwargs(): return Two(), (torch.ones(3, 4),), {"scale": torch.full((), 2.0)}
def nothing(): return None
def only_module(): return nn.Linear(1, 1)
def bad_args(): return nn.Linear(1, 1), 3
def bad_kwargs(): return nn.Linear(1, 1), (torch.ones(1, 1),), [1]
def no_batch(): return nn.Linear(1, 1), (3,)
def samples(): return nn.Linear(1, 1), ([torch.ones(3, 8, 8)] * 2, [{"boxes": torch.ones(5, 4)}] * 2)
def other_samples(): return nn.Linear(1, 1), {"images": [torch.ones(3)], "targets": [{"boxes": torch.ones(5, 4)}] * 2}
def options(): return nn.Linear(4, 2), (torch.ones(3, 4), [{"flip": True}] * 2)
def no_parameters(): return nn.ReLU(), (torch.ones(2, 1),)
def needs(argument): return argument
def fails(): return {}["key"]
class Shelf:
    @staticmethod
    def made(): return plain()
value = 3
class Own(nn.Module):
    def __init__(self):
        super().__init__()
        self.one = nn.Linear(4, 2)
    def forward(self, x, labels):
        logits = self.one(x)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}
def find_model_loss(): return Own(), (torch.ones(3, 4),), {"labels": torch.zeros(3, dtype=torch.long)}
def only_kwargs(): return Own(), {"x": torch.ones(3, 4), "labels": torch.zeros(3, dtype=torch.long)}
def sized(num_classes=2): return nn.Linear(4, num_classes), (torch.ones(3, 4),)
def turning(): return nn.Linear(4, 2, dtype=torch.complex64), (torch.ones(3, 4, dtype=torch.complex64),)
def sparse(): return nn.Sequential(nn.Embedding(5, 4, sparse=True), nn.Linear(4, 2)), (torch.tensor([1, 3, 3]),)
"""


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "my_factories.py").write_text(textwrap.dedent(SOURCE))
    (tmp_path / "my_broken.py").write_text("x = 1 / 0\n")
    (tmp_path / "my_syntax.py").write_text("def f(:\n")
    (tmp_path / "my_needs.py").write_text("import not_there_at_all\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [one for one in sys.path if one])
    sys.modules.pop("my_factories", None)
    return tmp_path


def test_a_module_and_its_arguments() -> None:
    model = zoo.load("my_factories:plain")
    assert model.batch_size == 3
    assert model.loss(model.module(*model.args), model.target).shape == ()
    larger = model.example(5).args[0]
    assert torch.equal(larger[:, 0], torch.tensor([0.0, 4.0, 8.0, 0.0, 4.0]))
    assert zoo.load("my_factories:plain", batch=2).args[0].shape == (2, 4)
    assert zoo.load("my_factories:plain", dtype="float64").args[0].dtype == torch.float64
    turning = zoo.load("my_factories:turning", dtype="float32").module
    assert next(turning.parameters()).is_complex(), "no imaginary part is dropped"
    assert zoo.load("my_factories:lone_tensor").args[0].shape == (3, 4)
    assert zoo.load("my_factories:Shelf.made").batch_size == 3
    assert zoo.load("my_factories:options").batch_size == 3


def test_keyword_arguments_and_a_dictionary_out() -> None:
    model = zoo.load("my_factories:with_kwargs", batch=2)
    assert model.kwargs["scale"].shape == ()
    output = model.module(*model.args, **model.kwargs)
    assert model.loss(output, None).item() == surrogate_loss(output["a"]).item()
    assert model.notes == ()


def test_arguments_by_name_alone() -> None:
    """As a tokenizer returns them."""
    model = zoo.load("my_factories:only_kwargs", batch=5)
    assert model.args == ()
    assert {name: len(value) for name, value in model.kwargs.items()} == {"x": 5, "labels": 5}


def test_lists_of_samples() -> None:
    images, targets = zoo.load("my_factories:samples", batch=5, dtype="float64").args
    assert [image.shape for image in images] == [(3, 8, 8)] * 5
    assert [target["boxes"].dtype for target in targets] == [torch.float64] * 5


def test_a_model_that_computes_its_own_loss() -> None:
    model = zoo.load("my_factories:find_model_loss")
    output = model.module(*model.args, **model.kwargs)
    assert model.loss(output, None) is output["loss"]


def test_the_seed_decides_the_weights() -> None:
    first, second = zoo.load("my_factories:plain", seed=1), zoo.load("my_factories:plain", seed=1)
    other = zoo.load("my_factories:plain", seed=2)
    assert torch.equal(first.module.weight, second.module.weight)  # type: ignore[arg-type]
    assert not torch.equal(first.module.weight, other.module.weight)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no_module_here:f", "no module named 'no_module_here'"),
        ("my_factories.deeper:f", "no module named 'my_factories.deeper'"),
        ("my_broken:f", r"'my_broken' does not import: ZeroDivisionError: division by zero \(.*my_broken.py, line 1"),
        ("my_syntax:f", "'my_syntax' does not import: SyntaxError"),
        ("my_needs:f", "'my_needs' does not import: ModuleNotFoundError: No module named 'not_there_at_all'"),
        ("my_factories.py:plain", "write my_factories:plain"),
        ("my_factories:nothing", "returned None; let it return"),
        ("my_factories:only_module", "returned a value of type Linear; let it return"),
        ("my_factories:bad_args", "a value of type int as args"),
        ("my_factories:bad_kwargs", "a value of type list as kwargs"),
        ("my_factories:no_batch", "no tensor with a batch dimension"),
        ("my_factories:other_samples", "'images' is a list of 1 tensor, but argument 'targets' is a list of 2"),
        ("my_factories:no_parameters", "has no parameters"),
        ("my_factories:needs", "can't be called: it requires argument; add a default"),
        ("my_factories:fails", r"failed: KeyError: 'key' \(.*my_factories.py, line 25\)"),
        ("my_factories:value", "is a value of type int, not a function"),
        ("my_factories:", "names no factory"),
    ],
)  # fmt: skip
def test_errors(name: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        zoo.load(name)


def test_a_sparse_embedding_can_be_cut_but_not_trained_in_parts() -> None:
    model = zoo.load("my_factories:sparse")
    assert len(capture(model.module, model.args).calls) == 2
    plan = Plan(model=ModelSpec(name="my_factories:sparse"), batch=3)
    with pytest.raises(UsageError, match="0 is an embedding with sparse=True"):
        capture_for(plan, model)


def test_an_attribute_that_is_not_there() -> None:
    with pytest.raises(UnknownName, match="did you mean 'plain'"):
        zoo.load("my_factories:plan")


def test_a_factory_gets_its_options() -> None:
    with pytest.raises(UsageError, match=r"image_size=8 was given, but the factory .* takes no arguments"):
        zoo.load("my_factories:plain", image_size=8)
    assert zoo.load("my_factories:sized").module.out_features == 2  # type: ignore[union-attr]
    assert zoo.load("my_factories:sized", num_classes=7).module.out_features == 7  # type: ignore[union-attr]
