from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from stagewright.errors import UnknownName, UsageError
from stagewright.spec import Mesh, ModelSpec, OptimizerSpec, Plan, read_plan, write_plan
from stagewright.spec.plan_file import plan_from_table, plan_to_table, plan_to_toml

sizes = st.none() | st.integers(1, 10**6)
words = st.text(min_size=1, max_size=20)
seeds = st.integers(0, 2**32 - 1)
models = st.builds(
    ModelSpec,
    name=words,
    weights=st.none() | words,
    image_size=sizes,
    sequence_length=sizes,
    num_classes=sizes,
    padded=st.none() | st.booleans(),
    seed=seeds,
)
rates = st.floats(1e-300, 1e300)
optimizers = st.one_of(
    st.builds(
        OptimizerSpec,
        name=st.just("sgd"),
        learning_rate=rates,
        momentum=st.floats(0, 1, exclude_max=True),
        weight_decay=rates,
    ),
    st.builds(OptimizerSpec, name=st.sampled_from(["adam", "adamw"]), learning_rate=rates, weight_decay=rates),
)


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    mesh = Mesh(data=draw(st.integers(1, 3)), tensor=draw(st.integers(1, 2)), pipeline=draw(st.integers(1, 4)))
    schedule = draw(st.sampled_from(["gpipe", "1f1b", "interleaved", "looped-bfs", "zbv", "dualpipev"]))
    microbatches = 8 * mesh.pipeline
    training = draw(st.booleans())
    plan = Plan(
        model=draw(models),
        batch=draw(st.integers(microbatches * mesh.data, 10**9)),
        mesh=mesh,
        microbatches=microbatches,
        schedule=schedule,
        units=draw(words),
        shard=mesh.data > 1 and mesh.pipeline == 1 and training and draw(st.booleans()),
        precision=draw(
            st.sampled_from(["float32", "bf16", *(["bf16-mixed", "fp16-mixed"] if mesh.tensor == 1 else [])])
        ),
        compile=draw(st.sampled_from(["none", "stages", "units"])),
        batch_norm=draw(st.sampled_from(["plain", "deferred"])),
        training=training,
        devices=draw(st.sampled_from([(), tuple(f"cpu:{rank}" for rank in range(mesh.num_workers))])),
        memory_bytes=draw(st.none() | st.integers(1, 2**60) | st.integers(1, 2**20).map(lambda n: n * 2**20)),
        seed=draw(seeds),
        task=draw(words),
        epochs=draw(sizes),
        optimizer=draw(optimizers),
        clip=draw(st.none() | rates) if training else None,
        checkpoint_every=draw(sizes) if training else None,
    )
    cuts = draw(st.lists(words, min_size=plan.num_stages - 1, max_size=plan.num_stages - 1, unique=True))
    recompute = draw(st.sampled_from(["none", "always", "except-last", (True,) * plan.num_stages]))
    return Plan(
        **{**{name: getattr(plan, name) for name in plan.__slots__}, "cuts": tuple(cuts), "recompute": recompute}
    )


@given(plans())
def test_round_trip(plan: Plan) -> None:
    assert plan_from_table(tomllib.loads(plan_to_toml(plan))) == plan
    assert plan_from_table(json.loads(json.dumps(plan_to_table(plan)))) == plan


def test_round_trip_on_disk(tmp_path: Path) -> None:
    plan = Plan(model=ModelSpec(name="deit-small"), batch=32, mesh=Mesh(pipeline=2), microbatches=4, memory_bytes=2**31)
    write_plan(plan, tmp_path / "plan.toml")
    assert read_plan(tmp_path / "plan.toml") == plan
    assert 'memory = "2GiB"\n' in (tmp_path / "plan.toml").read_text()
    assert [path.name for path in tmp_path.iterdir()] == ["plan.toml"]


def read(tmp_path: Path, content: str) -> Plan:
    path = tmp_path / "my-plan.toml"
    path.write_text(content)
    return read_plan(path)


def test_the_least_file(tmp_path: Path) -> None:
    assert read(tmp_path, 'batch = 4\n[model]\nname = "mlp-mnist"') == Plan(model=ModelSpec(name="mlp-mnist"), batch=4)


def test_the_plan_in_the_docstring_style(tmp_path: Path) -> None:
    plan = read(
        tmp_path,
        """
        batch = 32
        microbatches = 4
        memory = "1.5GiB"
        recompute = [true, false]
        model = {name = "deit-small", image_size = 32}
        mesh = {pipeline = 2}
        optimizer = {name = "adamw", learning_rate = 1}
        """,
    )
    assert plan.memory_bytes == 1.5 * 2**30
    assert plan.recompute == (True, False)
    assert plan.optimizer == OptimizerSpec(name="adamw", learning_rate=1.0)
    assert isinstance(plan.optimizer.learning_rate, float)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("bach = 4", "unknown key 'bach'; did you mean 'batch'"),
        ("epoch = 4", "unknown key 'epoch'; did you mean 'epochs'? (in {path})"),
        ('batch = 4\n[model]\nnmae = "x"', "unknown key 'nmae'; did you mean 'name'"),
        ("batch = 4\n[mesh]\npipelines = 2", "unknown key 'pipelines'; did you mean 'pipeline'? (in {path}: mesh)"),
        ('model = {name = "x"}', "{path}: batch is missing"),
        ("batch = 4\n[model]", "{path}: model: name is missing"),
        ('batch = "four"', '{path}: batch must be a whole number, not "four"'),
        ("batch = true", "{path}: batch must be a whole number, not true"),
        ("batch = 4.0", "{path}: batch must be a whole number, not 4.0"),
        ("shard = 1", "{path}: shard must be true or false, not 1"),
        ("schedule = 3", "{path}: schedule must be a string in quotes, not 3"),
        ('schedule = "1f2b"', "unknown schedule '1f2b'; did you mean '1f1b'? (in {path})"),
        ('devices = "cpu:0"', '{path}: devices must be a list in brackets, not "cpu:0"'),
        ('devices = ["cpu:0", 1]', "{path}: devices[1] must be a string in quotes, not 1"),
        (
            'recompute = "maybe"',
            "unknown recompute 'maybe'; known: none, always, except-last, attention (or names of units: --recompute "
            "layers.0,layers.1, in a plan a list; in {path})",
        ),
        ("recompute = [1]", "{path}: recompute[0] must be true or false, not 1"),
        ('memory = "2 gallons"', "{path}: memory: '2 gallons' is not a size; write it like 2GiB"),
        ("model = 3", "{path}: model must be a table, not 3"),
        ("[mesh]\ndata = 0", "{path}: mesh: data = 0, but every axis has at least 1 worker"),
        ("[optimizer]\nlearning_rate = 'x'", '{path}: optimizer: learning_rate must be a number, not "x"'),
        ("batch = ", "{path} is not TOML: Invalid value (at "),
        ("batch = 1\nmicrobatches = 2\n[model]\nname = 'x'", "{path}: a batch of 1 can't be split into 2"),
    ],
)
def test_wrong_files(tmp_path: Path, content: str, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        read(tmp_path, content)
    assert message.format(path=tmp_path / "my-plan.toml") in str(caught.value)
    assert "\n" not in str(caught.value)


def test_files_that_are_not_there_or_not_text(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"no plan .*none.toml; create it with `stagewright plan MODEL -o"):
        read_plan(tmp_path / "none.toml")
    (tmp_path / "binary.toml").write_bytes(b"a = '\xff'")
    with pytest.raises(UsageError, match=r"binary.toml is not TOML: .* save it as UTF-8"):
        read_plan(tmp_path / "binary.toml")
    with pytest.raises(UsageError, match=r"can't write .*nowhere/plan.toml: No such file"):
        write_plan(Plan(model=ModelSpec(name="x"), batch=1), tmp_path / "nowhere" / "plan.toml")


def test_mesh_accepts_short_axis_names(tmp_path: Path) -> None:
    plan = read(tmp_path, 'batch = 8\nmicrobatches = 2\n[model]\nname = "x"\n[mesh]\ndp = 2\ntp = 2\npp = 2')
    assert plan.mesh == Mesh(data=2, tensor=2, pipeline=2)
    assert plan_to_table(plan)["mesh"] == {"data": 2, "tensor": 2, "pipeline": 2, "expert": 1, "context": 1}
    with pytest.raises(UsageError, match="mesh: data is given twice"):
        read(tmp_path, "batch = 8\n[mesh]\ndp = 2\ndata = 2")


def test_unknown_keys_have_their_class(tmp_path: Path) -> None:
    with pytest.raises(UnknownName):
        read(tmp_path, "bach = 4")
