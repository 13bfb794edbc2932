from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from PIL import Image

from stagewright import zoo
from stagewright.errors import DataMissing, UnknownName, UsageError
from stagewright.zoo.tasks.image import prepare_image


def trained(model: zoo.Model, task: zoo.Task, num_epochs: int, batch_size: int = 64) -> float:
    """The metric on the evaluation split after some epochs."""
    optimizer = torch.optim.AdamW(model.module.parameters(), lr=2e-3)
    samples = task.dataset("train")
    for epoch in range(num_epochs):
        for batch in samples.batches(batch_size, shuffle_seed=epoch):
            optimizer.zero_grad()
            task.loss(model.module(*batch.args, **batch.kwargs), batch.target).backward()
            optimizer.step()
    model.module.eval()
    with torch.no_grad():
        found = [
            task.predictions(model.module(*batch.args, **batch.kwargs), batch.target)
            for batch in task.dataset("evaluation").batches(256)
        ]
    return task.metric(np.concatenate([one for one, _ in found]), np.concatenate([one for _, one in found]))


def test_digits_are_split_once_and_for_all() -> None:
    task = zoo.load_task("digits", zoo.load("digits-vit"))
    train, test = task.dataset("train"), task.dataset("test")
    assert (len(train), len(test)) == (1437, 360)
    assert np.array_equal(np.bincount(test.labels), [36, 36, 35, 37, 36, 37, 36, 36, 35, 36])
    assert torch.equal(train[5].args[0], zoo.load_task("digits", zoo.load("digits-vit")).dataset("train")[5].args[0])
    batches = list(test.batches(100))
    assert [len(one.target) for one in batches] == [100, 100, 100, 60]
    assert [len(one.target) for one in test.batches(100, drop_last=True)] == [100, 100, 100]
    assert torch.cat([one.target for one in batches]).tolist() == test.labels.tolist()
    shuffled = torch.cat([one.target for one in test.batches(100, shuffle_seed=1)])
    assert shuffled.tolist() != test.labels.tolist()
    assert sorted(shuffled.tolist()) == sorted(test.labels.tolist())


@pytest.mark.long
def test_the_digits_transformer_learns() -> None:
    model = zoo.load("digits-vit")
    assert trained(model, zoo.load_task("digits", model), num_epochs=3) > 0.8


@pytest.mark.parametrize(
    ("name", "options", "num_epochs"),
    [
        pytest.param("digits-vit", {}, 4, marks=pytest.mark.long),
        ("bert-minilm", {"sequence_length": 4}, 0),
        ("mlp-mnist", {}, 2),
    ],
)
def test_synthetic_samples_follow_the_model(name: str, options: dict[str, int], num_epochs: int) -> None:
    model = zoo.load(name, **options)  # type: ignore[arg-type]
    task = zoo.load_task("synthetic", model)
    batch = task.dataset("train").batch([0, 1, 2])
    assert batch.args[0].shape[1:] == model.args[0].shape[1:]
    assert torch.equal(batch.args[0][1], task.dataset("train")[1].args[0][0])
    if num_epochs:
        assert trained(model, task, num_epochs) > 0.9


def test_synthetic_sequences_can_be_continued() -> None:
    model = zoo.load("gpt-layers:1", sequence_length=6)
    task = zoo.load_task("synthetic", model)
    batch = task.dataset("test").batch([0, 7])
    steps = (batch.args[0][:, 1:] - batch.args[0][:, :-1]) % 64
    assert bool((steps == steps[:, :1]).all())
    logits = torch.nn.functional.one_hot(batch.target.roll(-1, 1), 100).float()
    predicted, true = task.predictions(logits, batch.target)
    assert len(true) == 10
    assert task.metric(predicted, true) == 1.0


def test_images_are_resized_and_normalised() -> None:
    gray = Image.fromarray(np.full((28, 28), 51, dtype=np.uint8))
    color = prepare_image(gray, zoo.ImageInput(channels=3, size=32, mean=(0.1, 0.2, 0.3), std=(0.1, 0.1, 0.2)))
    assert color.shape == (3, 32, 32)
    assert color[:, 0, 0] == pytest.approx([1.0, 0.0, -0.5], abs=1e-6)
    flat = prepare_image(gray, zoo.ImageInput(channels=1, size=28, mean=(0.0,), std=(1.0,), flatten=True))
    assert flat.shape == (784,)
    assert flat.dtype == np.float32
    with pytest.raises(UsageError, match="1 or 3 channels, but the model takes 2"):
        prepare_image(gray, zoo.ImageInput(channels=2, size=28))


def test_incompatible_tasks() -> None:
    with torch.device("meta"):
        images, texts, words = zoo.load("deit-tiny"), zoo.load("bert-minilm"), zoo.load("gpt2")
    with pytest.raises(UsageError, match="consists of texts, but the model 'deit-tiny' takes images"):
        zoo.load_task("rte", images)
    with pytest.raises(UsageError, match="has 1000; load the model with num_classes=10"):
        zoo.load_task("digits", images)
    with pytest.raises(UsageError, match="predicts the next token"):
        zoo.load_task("rte", words)
    with pytest.raises(DataMissing, match=r"needs a tokenizer, .*--tokenizer DIR"):
        zoo.load_task("rte", texts)
    with pytest.raises(UnknownName, match="did you mean 'digits'"):
        zoo.load_task("digit", images)
    with pytest.raises(UnknownName, match="known: train, test, evaluation"):
        zoo.load_task("synthetic", images).dataset("xyz")


def test_a_tokenizer_of_another_model(data_dir: Path) -> None:
    tokenizer = data_dir / "minilm-l6"
    if not tokenizer.is_dir():
        pytest.skip(f"no minilm-l6 in {data_dir}")
    with torch.device("meta"):
        model = zoo.load("bert-minilm")
    assert zoo.load_task("cola", model, tokenizer=tokenizer).metric_name == "matthews"
    small = transformers.BertConfig(vocab_size=99, hidden_size=8, num_attention_heads=2)
    with pytest.raises(UsageError, match=r"has 30522 tokens, but the model .* has only 99"):
        zoo.tasks.load_task("rte", _with_config(small), tokenizer=tokenizer)


def _with_config(config: transformers.PreTrainedConfig) -> zoo.Model:
    import tempfile

    with tempfile.TemporaryDirectory() as folder, torch.device("meta"):
        config.save_pretrained(folder)
        return zoo.load(f"hf:{folder}", weights="random", num_classes=2)


def test_real_images_and_sentences(data_dir: Path) -> None:
    for name in ("cifar10-small", "glue/rte", "minilm-l6"):
        if not (data_dir / name).is_dir():
            pytest.skip(f"no {name} in {data_dir}")
    with torch.device("meta"):
        images = zoo.load("deit-tiny", num_classes=10)
        texts = zoo.load("bert-minilm", sequence_length=64)
    samples = zoo.load_task("cifar10", images, data_dir=data_dir / "cifar10-small").dataset("train")
    batch = samples.batch([0, 1999])
    assert (len(samples), batch.args[0].shape) == (2000, (2, 3, 224, 224))
    task = zoo.load_task("rte", texts, data_dir=data_dir, tokenizer=data_dir / "minilm-l6")
    batch = task.dataset("validation").batch([0, 1, 2])
    assert batch.args[0].shape == batch.kwargs["attention_mask"].shape == (3, 64)
    assert set(batch.kwargs["token_type_ids"].unique().tolist()) == {0, 1}
    assert batch.target.tolist() == [1, 0, 1]
    assert task.splits == ("train", "validation")
