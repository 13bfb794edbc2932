from __future__ import annotations

import os
import shutil
import sqlite3
from datetime import datetime
from pathlib import Path

import pytest

from stagewright.runs import RunFolder, RunIndex, RunRow
from stagewright.runs.index import INDEX_NAME
from stagewright.spec import Mesh, ModelSpec, Plan

PLAN = Plan(model=ModelSpec(name="deit-small"), batch=8, mesh=Mesh(pipeline=2), microbatches=2)


def rows(root: Path) -> list[RunRow]:
    with RunIndex(root) as index:
        return index.rows()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    first = RunFolder.create(tmp_path, PLAN, environment={}, now=datetime(2026, 11, 15, 3))
    first.finish("done", {"samples_per_s": 12.5, "speedup": 1.5, "equal": True, "peak_memory_bytes": [3, 7, 5]})
    RunFolder.create(tmp_path, PLAN, environment={}, now=datetime(2026, 11, 15, 4))
    return tmp_path


def test_rows(root: Path) -> None:
    newest, oldest = rows(root)
    assert (newest.name, newest.status) == ("2026-11-15-040000-deit-small-pipeline-2", "unfinished")
    assert (oldest.status, oldest.samples_per_s, oldest.speedup, oldest.equal) == ("done", 12.5, 1.5, True)
    assert oldest.peak_memory_bytes == 7
    assert (oldest.model, oldest.strategy, oldest.workers, oldest.batch) == ("deit-small", "pipeline", 2, 8)
    assert (oldest.microbatches, oldest.schedule, oldest.mesh) == (2, "1f1b", "pipeline=2")


def test_it_follows_the_folders(root: Path) -> None:
    before = rows(root)
    RunFolder.open(root / before[0].name).finish("failed", {"error": "worker 1 was killed", "loss": float("nan")})
    shutil.rmtree(root / before[1].name)
    (after,) = rows(root)
    assert (after.name, after.status, after.error, after.loss) == (
        before[0].name,
        "failed",
        "worker 1 was killed",
        None,
    )


def test_what_is_not_a_run_is_left_alone(root: Path) -> None:
    (root / "notes").mkdir()
    (root / "notes" / "a.txt").write_text("x")
    (root / ".new-123").mkdir()
    (root / ".new-123" / "plan.toml").write_text("")
    assert len(rows(root)) == 2


def test_runs_in_groups(root: Path) -> None:
    RunFolder.create(root / "compare" / "one", PLAN, environment={}, now=datetime(2026, 11, 15, 5))
    assert rows(root)[0].name == "compare/one/2026-11-15-050000-deit-small-pipeline-2"


def test_a_damaged_run_is_shown_as_such(root: Path) -> None:
    name = rows(root)[0].name
    (root / name / "plan.toml").write_text("bach = 3")
    (damaged,) = [row for row in rows(root) if row.status == "damaged"]
    assert damaged.name == name
    assert "unknown key 'bach'" in (damaged.error or "")


@pytest.mark.parametrize("damage", ["text", "other table", "other version", "wrong rows", "half"])
def test_a_damaged_index_is_built_again(root: Path, damage: str) -> None:
    before, path = rows(root), root / INDEX_NAME
    if damage == "text":
        path.write_text("not a database, but long enough to be taken for one" * 100)
    elif damage == "half":
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    else:
        with sqlite3.connect(path) as database:
            if damage == "other table":
                database.execute("DROP TABLE runs")
                database.execute("CREATE TABLE runs (name TEXT)")
            elif damage == "other version":
                database.execute("PRAGMA user_version = 99")
            else:
                database.execute("""UPDATE runs SET row = '{"no": 1}'""")
        database.close()
    assert rows(root) == before
    with sqlite3.connect(path) as database:
        assert database.execute("SELECT count(*) FROM runs").fetchone() == (2,)
    database.close()


def test_a_deleted_index_is_built_again(root: Path) -> None:
    before = rows(root)
    (root / INDEX_NAME).unlink()
    assert rows(root) == before


def test_an_index_that_another_process_holds(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = rows(root)
    real = sqlite3.connect
    monkeypatch.setattr(sqlite3, "connect", lambda place, timeout, **more: real(place, timeout=0.05, **more))
    holder = real(root / INDEX_NAME)
    try:
        holder.execute("BEGIN EXCLUSIVE")
        assert rows(root) == before
    finally:
        holder.close()


def test_a_folder_that_can_not_be_written(root: Path) -> None:
    before = rows(root)
    (root / INDEX_NAME).unlink()
    os.mkdir(root / INDEX_NAME)  # whoever runs the tests may be root: a folder in the way stops them too
    assert rows(root) == before


def test_no_runs(tmp_path: Path) -> None:
    assert rows(tmp_path) == []
    assert rows(tmp_path / "none") == []
    assert not (tmp_path / "none").exists()


def test_collectives_on_a_network_are_runs_too(root: Path) -> None:
    folder = root / "2026-11-15-050000-fabric-mlp-4"
    folder.mkdir()
    (folder / "fabric.json").write_text(
        '{"begun": "2026-11-15T05:00:00+00:00", "settings": {}, "workload": {"name": "mlp", "num_ranks": 4}}'
    )
    (unfinished, *_) = rows(root)
    assert (unfinished.name, unfinished.strategy, unfinished.status) == (folder.name, "fabric", "unfinished")
    (folder / "result.json").write_text('{"total": {"p50_s": 0.02}, "error": null}')
    (done, *_) = rows(root)
    assert (done.model, done.workers, done.p50_s, done.status) == ("mlp", 4, 0.02, "done")
    (folder / "fabric.json").write_text('{"begun": 3}')
    assert "can't be read" in str({one.name: one for one in rows(root)}[folder.name].error)


def test_a_link_and_a_database_of_another_program_are_left_alone(root: Path, tmp_path: Path) -> None:
    before, path = rows(root), root / INDEX_NAME
    path.unlink()
    other = tmp_path / "other.sqlite"
    with sqlite3.connect(other) as database:
        database.execute("CREATE TABLE runs (mine TEXT)")
    database.close()
    content = other.read_bytes()
    path.write_bytes(content)
    assert rows(root) == before
    assert path.read_bytes() == content
    path.unlink()
    path.symlink_to(other)
    assert rows(root) == before
    assert other.read_bytes() == content


def test_links_to_folders_are_not_followed(root: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    elsewhere = RunFolder.create(
        tmp_path_factory.mktemp("elsewhere"), PLAN, environment={}, now=datetime(2026, 11, 15, 5)
    )
    (root / "link").symlink_to(elsewhere.path)
    (root / "loop").symlink_to(root)
    assert len(rows(root)) == 2


@pytest.mark.parametrize(
    ("file", "content", "reason"),
    [
        ("result.json", '{"samples_per_s": "abc"}', "samples_per_s is 'abc', not a number"),
        ("result.json", '{"status": "done", "ended": 5}', "ended is 5, not a string"),
        ("result.json", '{"epochs": [{"accuracy": "x"}], "metric": "accuracy"}', "epoch is missing"),
        ("result.json", "[" * 100_000, "nested too deeply"),
        ("result.json", '{"link_bytes": 7}', "link_bytes is 7, not an object"),
        ("environment.json", "[]", "must hold a JSON object"),
        ("plan.toml", "x = " + "[" * 50_000, "nested too deeply"),
    ],
)
def test_one_damaged_run_is_one_row(root: Path, file: str, content: str, reason: str) -> None:
    name = rows(root)[0].name
    (root / name / file).write_text(content)
    found = {row.name: row for row in rows(root)}
    assert len(found) == 2
    assert found[name].status == "damaged"
    assert reason in str(found[name].error)


def test_a_name_that_is_not_utf8(root: Path) -> None:
    os.rename(root / rows(root)[0].name, os.fsencode(root) + b"/2026-11-15-\xff\x1b[2J")
    assert next(row.name for row in rows(root)).startswith("2026-11-15-\\xff")
