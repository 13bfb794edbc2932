"""Recipes for job systems: they parse, and say what the worker's entry point understands."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from stagewright.engine.worker.placement import RankPlacement

RECIPES = Path(__file__).parents[2] / "recipes"
SLURM = RECIPES / "slurm" / "stagewright.sbatch"
KUBERNETES = RECIPES / "kubernetes" / "stagewright.yaml"
JOBSET = RECIPES / "kubernetes" / "jobset.yaml"
SCHEMAS = "1.37"
BASH = shutil.which("bash")

needs_bash = pytest.mark.skipif(BASH is None, reason="there is no bash to parse a script with")


def parses(script: str) -> None:
    done = subprocess.run([str(BASH), "-n"], input=script, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")


def documents() -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(KUBERNETES.read_text(encoding="utf-8")))


@needs_bash
def test_slurm_script_and_its_inner_script_parse() -> None:
    script = SLURM.read_text(encoding="utf-8")
    parses(script)
    inner = re.search(r"bash -c '(.*)'\n", script, re.DOTALL)
    assert inner is not None
    parses(inner[1])


@needs_bash
def test_slurm_script_starts_the_worker_on_each_machine(tmp_path: Path) -> None:
    # Stand-ins for Slurm's commands and torchrun show what would be run.
    for name, body in {
        "scontrol": 'printf "%s\\n" node-a node-b',
        "srun": 'shift 2; SLURM_NODEID=1 exec "$@"',
        "torchrun": 'printf "%s\\n" "$@"',
    }.items():
        path = tmp_path / name
        path.write_text(f"#!{BASH}\n{body}\n")
        path.chmod(0o755)
    environment = {
        "PATH": f"{tmp_path}:/usr/bin:/bin",
        "SLURM_JOB_ID": "70123",
        "SLURM_JOB_NODELIST": "node-[a-b]",
        "SLURM_NNODES": "2",
        "SLURM_GPUS_ON_NODE": "4",
    }
    done = subprocess.run(
        [str(BASH), str(SLURM), "my plan.toml"], capture_output=True, text=True, timeout=120, env=environment
    )
    assert (done.returncode, done.stderr) == (0, "")
    words = "--nnodes 2 --node-rank 1 --nproc-per-node 4 --master-addr node-a --master-port 30123 --max-restarts 0"
    expected = [*words.split(), "-m", "stagewright", "worker", "my plan.toml", "--run-folder", "runs/slurm-70123"]
    assert done.stdout.splitlines() == expected
    without_plan = subprocess.run([str(BASH), str(SLURM)], capture_output=True, text=True, timeout=120, env=environment)
    assert without_plan.returncode != 0
    assert "the plan: sbatch" in without_plan.stderr


def test_kubernetes_documents_fit_together() -> None:
    service, job = documents()
    assert (service["kind"], job["kind"]) == ("Service", "Job")
    pod = job["spec"]["template"]["spec"]
    name = job["metadata"]["name"]
    assert service["spec"]["selector"] == {"job-name": name}
    assert service["spec"]["clusterIP"] == "None"
    assert pod["subdomain"] == service["metadata"]["name"]
    assert job["spec"]["completionMode"] == "Indexed"
    assert job["spec"]["completions"] == job["spec"]["parallelism"]
    assert (job["spec"]["backoffLimit"], pod["restartPolicy"]) == (0, "Never")
    container = pod["containers"][0]
    variables = {one["name"]: one["value"] for one in container["env"]}
    assert variables["MACHINES"] == str(job["spec"]["completions"])
    assert all(isinstance(value, str) for value in variables.values())
    assert f"--master-addr {name}-0.{pod['subdomain']} --master-port 29500" in container["args"][0]
    assert {one["name"] for one in container["volumeMounts"]} == {one["name"] for one in pod["volumes"]}
    used = set(re.findall(r"\$(\w+)", container["args"][0])) - {"JOB_COMPLETION_INDEX"}
    assert used <= set(variables)


def test_kubernetes_documents_match_the_published_schemas() -> None:
    for document in documents():
        kubernetes_validate.validate(document, SCHEMAS, strict=True)
    broken = documents()[1]
    broken["spec"]["completion"] = 2
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(broken, SCHEMAS, strict=True)


def test_jobset_has_the_structure_of_its_definition() -> None:
    """Its own fields by the API v1alpha2; the Job and the pod in it by the published schema of Jobs."""
    document = yaml.safe_load(JOBSET.read_text(encoding="utf-8"))
    assert (document["apiVersion"], document["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    spec = document["spec"]
    assert set(spec) <= {"network", "failurePolicy", "successPolicy", "replicatedJobs", "startupPolicy", "suspend"}
    assert set(spec["network"]) <= {"enableDNSHostnames", "subdomain", "publishNotReadyAddresses"}
    assert set(spec["failurePolicy"]) <= {"maxRestarts", "restartStrategy", "rules"}
    (job,) = spec["replicatedJobs"]
    assert set(job) <= {"name", "replicas", "template", "groupName", "dependsOn"}
    kubernetes_validate.validate(
        {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": job["name"]}, **job["template"]},
        SCHEMAS,
        strict=True,
    )
    pod = job["template"]["spec"]["template"]["spec"]
    first = f"{document['metadata']['name']}-{job['name']}-0-0.{document['metadata']['name']}"
    assert f"--master-addr {first} " in pod["containers"][0]["args"][0]
    parses(pod["containers"][0]["args"][0])


def test_images_are_pinned() -> None:
    for path in (KUBERNETES, JOBSET):
        images = re.findall(r"image: (\S+)", path.read_text(encoding="utf-8"))
        assert images
        assert all(re.search(r":\d+\.\d+\.\d+$|@sha256:[0-9a-f]{64}$", image) for image in images)


@needs_bash
def test_kubernetes_script_and_the_readmes_scripts_parse() -> None:
    parses(documents()[1]["spec"]["template"]["spec"]["containers"][0]["args"][0])
    blocks = re.findall(r"```bash\n(.*?)```", (RECIPES / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    assert len(blocks) == 1
    for block in blocks:
        parses(block)


def test_readme_names_files_that_are_there() -> None:
    found = re.findall(r"\]\(([^)]+)\)", (RECIPES / "README.md").read_text(encoding="utf-8"))
    links = [link for link in found if not link.startswith("https://")]
    assert links == ["slurm/stagewright.sbatch", "kubernetes/stagewright.yaml", "kubernetes/jobset.yaml"]
    assert all((RECIPES / link).is_file() for link in links)


def test_the_variables_that_torchrun_sets_are_enough() -> None:
    words = {"RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8", "GROUP_WORLD_SIZE": "2"}
    place = RankPlacement.from_environment({**words, "MASTER_ADDR": "node-a", "MASTER_PORT": "30123"})
    assert (place.rank, place.num_machines, place.launcher) == (5, 2, None)
