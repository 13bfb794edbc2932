"""docs/json.md lists exactly the fields that the commands print, with their types.

Each heading of the page is an object, its table lists the fields. A type is `string`, `integer`, `number`, `boolean`, a
link to another heading, `list of …`, `map of …`, and may end in `or null`; `(optional)` after a field's name means that
it may be missing.
"""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.studies.conftest import ENVIRONMENT, small_study
from tests.verification import steps

from program import run_program
from stagewright.engine.worker.faults import Fault
from stagewright.runs.run_folder import RunFolder
from stagewright.spec.plan import Mesh, ModelSpec, Plan
from stagewright.studies import run_study
from stagewright.studies.runner.folder import StudyFolder

PAGE = Path(__file__).resolve().parents[2] / "docs" / "json.md"
_ROW = re.compile(r"^\| `(?P<field>\w+)`(?P<optional> \(optional\))? \| (?P<kind>[^|]+) \| [^|]+ \|$", re.MULTILINE)
_PLAIN = {"string": str, "integer": int, "number": (int, float), "boolean": bool}

Field = tuple[str, bool]  # its type and whether it is optional


def documented() -> dict[str, dict[str, Field]]:
    """Read heading → field → type from the page."""
    objects = {}
    for section in re.split(r"^## ", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]:
        title, _, body = section.partition("\n")
        rows = {row["field"]: (row["kind"].strip(), bool(row["optional"])) for row in _ROW.finditer(body)}
        assert len(rows) == sum(line.startswith("| `") for line in body.splitlines()), f"a row of {title} is malformed"
        objects[title.strip().strip("`").lower().replace(" ", "-")] = rows
    return objects


class Checker:
    """Compares data with the page."""

    def __init__(self) -> None:
        self.page = documented()

    def check_object(self, name: str, data: dict[str, Any], where: str) -> None:
        fields = self.page[name]
        needed = {field for field, (_, optional) in fields.items() if not optional}
        assert needed <= set(data) <= set(fields), f"{where} has {sorted(data)}, the page says {sorted(fields)}"
        for field, value in data.items():
            self.check(fields[field][0], value, f"{where}.{field}")

    def check(self, kind: str, value: Any, where: str) -> None:
        if kind == "any":
            return
        if kind.endswith(" or null"):
            if value is None:
                return
            kind = kind.removesuffix(" or null")
        if kind.startswith("list of "):
            assert isinstance(value, list), where
            for index, item in enumerate(value):
                self.check(kind.removeprefix("list of "), item, f"{where}[{index}]")
        elif kind.startswith("map of "):
            assert isinstance(value, dict), where
            for key, item in value.items():
                self.check(kind.removeprefix("map of "), item, f"{where}[{key!r}]")
        elif link := re.fullmatch(r"\[[^\]]+\]\(#([\w-]+)\)", kind):
            assert isinstance(value, dict), where
            self.check_object(link[1], value, where)
        else:
            assert isinstance(value, _PLAIN[kind]), f"{where} is {value!r}, the page says {kind}"
            assert isinstance(value, bool) == (kind == "boolean"), f"{where} is {value!r}, the page says {kind}"


def output(*arguments: str, cache: Path) -> dict[str, Any]:
    environment = {**os.environ, "STAGEWRIGHT_CACHE": str(cache)}
    done = run_program([*arguments, "--json"], env=environment, check=True)
    data: dict[str, Any] = json.loads(done.stdout)
    return data


@pytest.fixture(scope="module")
def checker() -> Checker:
    return Checker()


@pytest.fixture(scope="module")
def cache(shared_cache: Path) -> Path:
    return shared_cache


def test_models(checker: Checker, cache: Path) -> None:
    checker.check_object("models", output("models", cache=cache), "models")


@pytest.mark.slow
def test_profile_and_split(checker: Checker, cache: Path) -> None:
    small = ("digits-vit", "--micro-batch-size", "2", "--repeats", "1")
    checker.check_object("profile", output("profile", *small, cache=cache), "profile")
    split = output("split", *small, "--all", "--measure", "--stages", "5", "--memory", "1GiB", cache=cache)
    assert split["skipped"], "blocks can't make 5 stages of 4 blocks"
    checker.check_object("split", split, "split")


@pytest.mark.slow
def test_compare_and_runs(checker: Checker, cache: Path, tmp_path: Path) -> None:
    root = ("--root", str(tmp_path / "runs"))
    few = ("--batch", "4", "--microbatches", "2", "--steps", "2", "--warmup", "0", "--rounds", "2", *root)
    compared = output(
        "compare", "mlp-mnist", "--strategy", "serial pipeline tensor", "--vocab-parallel", *few, cache=cache
    )
    serial, pipeline, tensor = compared["rows"]
    assert (serial["equal"], serial["speedup"]) == (True, 1.0)
    assert pipeline["whole_batch"]["depends"] is False
    assert tensor["vocab_parallel"]
    assert tensor["refused"], "an MLP has no vocabulary"
    checker.check_object("compare", compared, "compare")
    runs = output("runs", *root, cache=cache)
    assert {run["status"] for run in runs["runs"]} == {"done", "refused"}
    checker.check_object("runs", runs, "runs")
    report = output("report", root[1], "-o", str(tmp_path / "report.html"), cache=cache)
    checker.check_object("report", report, "report")


@pytest.mark.slow
def test_doctor(checker: Checker, cache: Path, tmp_path: Path) -> None:
    data = output("doctor", "-o", str(tmp_path / "cluster.toml"), cache=cache)
    checker.check_object("doctor", data, "doctor")


@pytest.mark.slow
def test_codecs(checker: Checker, cache: Path) -> None:
    checker.check_object("codecs-list", output("codecs", "list", cache=cache), "codecs list")
    few = ("digits-vit", "--micro-batch-size", "4", "--repeats", "1", "--codecs", "block4,topk:10")
    checker.check_object("codecs-bench", output("codecs", "bench", *few, cache=cache), "codecs bench")


@pytest.mark.slow
def test_fabric(checker: Checker, cache: Path, tmp_path: Path) -> None:
    few = ("fabric", "run", "--sizes", "8", "--ranks", "3", "--trials", "20", "--root", str(tmp_path))
    runs = [output(*few, "--late", delay, cache=cache) for delay in ("1:0", "1:20ms")]
    assert runs[1]["layers"][0]["modes"], "a straggler"
    for run in runs:
        checker.check_object("fabric-run", run, "fabric run")
    compared = output("fabric", "compare", *(run["folder"] for run in runs), cache=cache)
    checker.check_object("fabric-compare", compared, "fabric compare")


@pytest.mark.long
def test_forecasts(checker: Checker, cache: Path, tmp_path: Path) -> None:
    plan = tmp_path / "plan.toml"
    plan.write_text('batch = 8\nmicrobatches = 2\n[model]\nname = "digits-vit"\n[mesh]\npipeline = 2\n')
    few = ("--repeats", "1")
    checker.check_object("forecast", output("forecast", str(plan), *few, cache=cache), "forecast")
    replicas = tmp_path / "replicas.toml"
    replicas.write_text('batch = 8\n[model]\nname = "mlp-mnist"\n[mesh]\ndata = 2\n')
    summed = output("forecast", str(replicas), *few, cache=cache)
    assert summed["collectives"]
    checker.check_object("forecast", summed, "forecast of replicas")
    checker.check_object("explain", output("explain", str(plan), *few, cache=cache), "explain")
    root = ("--root", str(tmp_path / "runs"))
    searched = ("mlp-mnist", "--batch", "4", "--schedules", "gpipe", "--verify", *few, *root)
    checker.check_object("plan", output("plan", *searched, cache=cache), "plan")
    fitted = ("mlp-mnist", "--memory", "8MiB", "--devices", "2", "--verify", *root)
    checker.check_object("fit", output("fit", *fitted, cache=cache), "fit")


def test_analytic_forecasts(checker: Checker, cache: Path, tmp_path: Path) -> None:
    cluster = tmp_path / "rented.toml"
    cluster.write_text(
        '[[devices]]\nkind = "cuda"\ncount = 8\nhosts = 2\nmemory = "64GiB"\nhardware = "own"\nprice = 2.0\n'
        'peak_flops = 400e12\nmemory_bandwidth = "3TB/s"\n[links.inter_host]\nbandwidth = "25GB/s"\nlatency = "8us"\n'
    )
    model = ("--analytic", "--model", "llama-3-8b", "--layout", "tp=2,pp=8,m=4")
    for where in (str(cluster), "2x8xh100"):
        for command in ("forecast", "explain"):
            data = output(command, *model, "--cluster", where, cache=cache)
            checker.check_object("analytic-forecast", data, command)


@pytest.mark.slow
def test_trace(checker: Checker, cache: Path, tmp_path: Path) -> None:
    root = ("--root", str(tmp_path / "runs"))
    few = ("--batch", "4", "--microbatches", "2", "--steps", "1", "--warmup", "0", *root)
    compared = output("compare", "mlp-mnist", "--strategy", "pipeline", *few, cache=cache)
    (row,) = compared["rows"]
    assert row["whole_batch"]["pieces"] > 1
    checker.check_object("compare", compared, "compare")
    words = ("--memory", "--compare-workers", "--forecast", "--repeats", "1")
    checker.check_object("trace", output("trace", row["run"], *words, cache=cache), "trace")


def test_recorded(checker: Checker, cache: Path, tmp_path: Path) -> None:
    """Explain traces of the profiler, and a run that was attached."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "trace" / "kineto"))
    from kineto_files import gpu_rank, write

    plan = Plan(model=ModelSpec(name="train.py"), batch=4, mesh=Mesh(data=2), steps=1)
    folder = RunFolder.create(tmp_path, plan, environment={})
    (folder.path / "attached.json").write_text("{}")
    for rank, late_us in ((0, 0.0), (1, 150.0)):
        profile = folder.worker(rank).path / "step-000007.json"
        profile.parent.mkdir()
        write(profile, rank, gpu_rank(late_us))
    explained = output("explain", str(folder.path), cache=cache)
    assert explained["culprit"]["ranks"] == [1]
    checker.check_object("recorded-step", explained, "explain")
    checker.check_object("trace", output("trace", str(folder.path), cache=cache), "trace")


def test_flight_recorder(checker: Checker, cache: Path, tmp_path: Path) -> None:
    for rank in (0, 1):
        entries = [{"collective_seq_id": n, "profiling_name": "nccl:all_reduce"} for n in range(1, 3 + rank)]
        (tmp_path / f"rank_{rank}.json").write_text(json.dumps({"entries": entries}))
    data = output("explain", *(str(tmp_path / f"rank_{rank}.json") for rank in (0, 1)), cache=cache)
    assert data["findings"][0]["ranks"] == [0]
    checker.check_object("flight-recorder", data, "explain")


def test_nccl_inspector(checker: Checker, cache: Path, tmp_path: Path) -> None:
    sys.path.insert(0, str(Path(__file__).parents[1] / "trace" / "nccl_inspector"))
    import inspector_logs as logs

    for path in logs.late_rank(tmp_path, late=1):
        rank = int(path.stem[-1])
        lines = [logs.line(rank, "Send", n, 2**20, 100 << rank, peer=(rank + 1) % 4) for n in range(4)]
        path.write_text(path.read_text() + "".join(lines))
    data = output("explain", str(tmp_path), cache=cache)
    assert {finding["kind"] for finding in data["findings"]} == {"late", "link"}
    checker.check_object("nccl-inspector", data, "explain")


def test_stragglers(checker: Checker, cache: Path, tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    kinds = ("forward-compute", "backward-compute", "optimizer")
    rows = [(dp, 0, dp, step, kind, n, 1.0 + dp, 0) for dp in (0, 1) for step in (0, 1) for n, kind in enumerate(kinds)]
    names = ("dp_rank", "stage", "rank", "step", "optype", "start_ts", "duration", "seq_id")
    table = pyarrow.table({name: [row[index] for row in rows] for index, name in enumerate(names)})
    parquet.write_table(table, tmp_path / "operations.parquet")
    checker.check_object("stragglers", output("explain", str(tmp_path / "operations.parquet"), cache=cache), "explain")


@pytest.mark.slow
def test_attach(checker: Checker, cache: Path, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import torch\nweight = torch.nn.Parameter(torch.ones(4, 4))\noptimizer = torch.optim.SGD([weight], lr=0.1)\n"
        "for _ in range(8):\n    (weight @ weight).sum().backward()\n    optimizer.step()\n"
    )
    words = ("attach", "--root", str(tmp_path), "--profile-steps", "3", "--json", "--", "python", str(script))
    done = run_program(words, check=True)
    checker.check_object("attach", json.loads(done.stdout), "attach")


def test_watch(checker: Checker, cache: Path, tmp_path: Path) -> None:
    plan = Plan(model=ModelSpec(name="mlp-mnist"), batch=4, mesh=Mesh(pipeline=2), microbatches=2, steps=3)
    folder = RunFolder.create(tmp_path, plan, environment={})
    with folder.worker(0) as worker:
        worker.append_metrics(step=0, seconds=0.5, loss=2.0, waited_s=0.1, memory_bytes=1024)
    checker.check_object("watch", output("watch", str(tmp_path), cache=cache), "watch")
    Fault(worker=1, kind="raised", message="no").write(folder.path / "workers" / "1" / "error.json")
    broken = output("watch", str(folder.path), cache=cache)
    assert broken["error"]["worker"] == 1
    checker.check_object("watch", broken, "watch")


def test_verify(checker: Checker, cache: Path, tmp_path: Path) -> None:
    steps.record_baseline(tmp_path / "baseline")
    steps.record_replicas(tmp_path / "candidate", loss_factor=2.0)
    words = ["verify", "--baseline", str(tmp_path / "baseline"), "--candidate", str(tmp_path / "candidate"), "--json"]
    done = run_program(words)
    assert done.returncode == 3, done.stderr
    checker.check_object("verify", json.loads(done.stdout), "verify")


def test_study(checker: Checker, tmp_path: Path) -> None:
    """Check the output of a synthetic study with a part that fails; all studies have the same form."""
    study = small_study(lambda name, context: {"one": 1, "three": 1 / 3}[name])
    folder = StudyFolder.create(tmp_path, study, command="stagewright study stages", environment=ENVIRONMENT)
    outcome = run_study(study, folder).to_dict()
    assert [part["error"] for part in outcome["parts"]] == [None, "KeyError: 'two'", None]
    checker.check_object("study", outcome, "study")


def test_every_documented_field_is_in_the_code(checker: Checker) -> None:
    """Commands print the fields that are not optional, which the tests above check; the optional ones exist."""
    texts = (path.read_text(encoding="utf-8") for path in (PAGE.parents[1] / "src").rglob("*.py"))
    words = {word for text in texts for word in re.findall(r"\w+", text)}
    fields = {(name, field) for name, fields in checker.page.items() for field in fields}
    assert {(name, field) for name, field in fields if field not in words} == set(), "documented, but not in the code"
