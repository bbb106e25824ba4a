"""Files that start a run on a cluster (`examples/launch/`), checked without one: by schemas, and on two raylets."""

import os
import re
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from rl_trainer.config import load_config
from rl_trainer.planning.gpus import pools_of
from rl_trainer.runtime.network import free_address

ROOT = Path(__file__).parents[1]
LAUNCH = ROOT / "examples" / "launch"
SCRIPTS = [LAUNCH / "ray_node.sh", LAUNCH / "slurm.sbatch"]
PAGE = (ROOT / "docs" / "guides" / "multi-node.md").read_text()


def gpus_of(recipe):
    config = load_config(recipe, ["data.path=there", "model.path=there"])
    return sum(pool.num_workers * pool.num_gpus for pool in pools_of(config)), config


@pytest.mark.process
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda file: file.name)
def test_scripts_pass_shellcheck_and_can_be_run(script):
    checked = subprocess.run(
        [Path(sys.executable).with_name("shellcheck"), "--external-sources", script], capture_output=True, check=False
    )
    assert checked.returncode == 0, checked.stdout.decode()
    assert script.stat().st_mode & stat.S_IXUSR


@pytest.mark.process
def test_the_shell_of_the_skypilot_file_passes_shellcheck_too(tmp_path):
    script = tmp_path / "run.sh"
    script.write_text("#!/usr/bin/env bash\n" + manifest("skypilot.yaml")["run"])
    names = ("SKYPILOT_NODE_IPS", "SKYPILOT_NUM_GPUS_PER_NODE", "SKYPILOT_NODE_RANK", "SKYPILOT_NUM_NODES")
    assert all(name in script.read_text() for name in names)
    subprocess.run([Path(sys.executable).with_name("shellcheck"), script], check=True)


def manifest(name):
    return yaml.safe_load((LAUNCH / name).read_text())


def test_the_page_s_table_is_what_the_recipes_ask_for():
    rows = re.findall(r"^\| `([\w.-]+)` \| (\d+) \| (\d+) \| (\d+) of (\d+) GPUs? \|$", PAGE, re.MULTILINE)
    assert len(rows) == 5
    for recipe, nodes, ranks, servers, each in rows:
        count, config = gpus_of(recipe)
        assert (int(nodes) * 8, int(ranks)) == (count, config.engine.world_size), recipe
        assert (int(servers), int(each)) == (config.rollout.num_replicas, config.rollout.parallel.num_ranks), recipe
        if int(nodes) > 1:
            assert (config.weights_transport, config.queue_storage) == ("tcp", None), (
                recipe
            )  # left open: ray on several machines


# What the CRD of RayJob (ray.io/v1) asks for and allows, as far as the file goes: required keys, then others.
POD = {"containers"}, {"volumes"}
GROUP = {"template", "rayStartParams"}, {"groupName", "replicas", "minReplicas", "maxReplicas"}
RAY_JOB = (
    {"rayClusterSpec", "entrypoint"},
    {
        *("submissionMode", "backoffLimit", "shutdownAfterJobFinishes", "ttlSecondsAfterFinished", "runtimeEnvYAML"),
        *("activeDeadlineSeconds", "jobId", "metadata", "suspend", "entrypointNumCpus", "entrypointNumGpus"),
    },
)


def check_keys(value, required, others, where):
    assert required <= value.keys(), f"{where} lacks {required - value.keys()}"
    assert value.keys() <= required | others, f"{where} has {value.keys() - required - others}"


def test_the_kuberay_file_is_a_ray_job_with_the_recipe_s_gpus():
    job = manifest("kuberay.yaml")
    check_keys(job, {"apiVersion", "kind", "metadata", "spec"}, set(), "the manifest")
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    check_keys(job["spec"], *RAY_JOB, "spec")
    cluster = job["spec"]["rayClusterSpec"]
    check_keys(cluster, {"headGroupSpec"}, {"workerGroupSpecs", "rayVersion"}, "rayClusterSpec")
    check_keys(cluster["headGroupSpec"], *GROUP, "headGroupSpec")
    (workers,) = cluster["workerGroupSpecs"]
    check_keys(workers, GROUP[0] | {"groupName"}, GROUP[1], "workerGroupSpecs[0]")
    for group in (cluster["headGroupSpec"], workers):
        assert all(isinstance(value, str) for value in group["rayStartParams"].values()), "the CRD has strings there"
        check_keys(group["template"]["spec"], *POD, "a pod")
        (container,) = group["template"]["spec"]["containers"]
        check_keys(container, {"name", "image", "resources", "volumeMounts"}, set(), "a container")
        assert container["resources"]["requests"] == container["resources"]["limits"], "GPUs cannot be overcommitted"
        mounted = {mount["name"] for mount in container["volumeMounts"]}
        assert mounted == {volume["name"] for volume in group["template"]["spec"]["volumes"]}
    assert workers["minReplicas"] <= workers["replicas"] <= workers["maxReplicas"]
    recipe = job["spec"]["entrypoint"].split()[1]
    each = int(workers["template"]["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"])
    assert workers["replicas"] * each == gpus_of(recipe)[0]
    import ray

    assert cluster["rayVersion"] == ray.__version__


def test_the_skypilot_file_has_a_task_s_keys_and_its_gpus():
    task = manifest("skypilot.yaml")
    check_keys(task, {"run"}, {"name", "num_nodes", "resources", "workdir", "file_mounts", "envs", "secrets"}, "task")
    check_keys(task["resources"], {"accelerators"}, {"disk_size", "image_id"}, "resources")
    assert all(isinstance(value, str) for value in task["envs"].values()), "SkyPilot takes strings"
    _, _, each = task["resources"]["accelerators"].partition(":")
    assert task["num_nodes"] * int(each) == gpus_of(task["envs"]["RECIPE"])[0]
    assert task["envs"]["PORT"] not in ("6379", "6380"), "SkyPilot's own Ray is there"


def test_the_containerfile_copies_files_and_has_device_stages():
    text = (LAUNCH / "Containerfile").read_text()
    stages = re.findall(r"^FROM \S+ AS base-(\w+)$", text, re.MULTILINE)
    assert stages == ["cpu", "cuda"]
    assert re.search(r"^FROM base-\$\{DEVICE\}$", text, re.MULTILINE)
    for line in re.findall(r"^COPY (.+)$", text, re.MULTILINE):
        *sources, _ = line.split()
        assert all((ROOT / source).exists() for source in sources), line
    named = re.findall(r"rl-stack:(\w+)", text + "".join((LAUNCH / f).read_text() for f in ("kuberay.yaml",)))
    assert {*named} == {"cpu", "cuda"}


SRUN = """#!/usr/bin/env bash
# As SLURM's on one machine: every node is this one, and its GPUs are made up.
while [[ "$1" == --* ]]; do shift; done
exec env GPUS=8 "$@"
"""
TRAIN = """#!/usr/bin/env bash
python - "$@" <<'PYTHON' > "$TOLD"
import sys, ray
ray.init(log_to_driver=False, logging_level="error")
print(sum(node["Alive"] for node in ray.nodes()), ray.cluster_resources()["GPU"], *sys.argv[1:])
PYTHON
exit 7
"""


@pytest.mark.promise("`slurm.sbatch` starts a Ray of several nodes behind a token, runs the recipe on it and ends it")
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_sbatch_file_runs_its_recipe_on_a_two_node_ray(tmp_path):
    """Two raylets on this machine, by the script's own ray commands, behind a token."""
    programs = {"srun": SRUN, "scontrol": "#!/bin/sh\nprintf '127.0.0.1\\n127.0.0.1\\n'\n", "rl-train": TRAIN}
    for name, text in programs.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    port = str(free_address("127.0.0.1")[1])
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    environment |= {
        "PATH": f"{tmp_path}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PORT": port,
        "SLURM_SUBMIT_DIR": str(ROOT),
        "SLURM_JOB_NODELIST": "two",
        "SLURM_JOB_ID": "1",
        "TOLD": str(tmp_path / "told"),
    }
    command = [LAUNCH / "slurm.sbatch", "qwen2.5-7b", "steps=1"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=550, check=False)
    told = (tmp_path / "told").read_text() if (tmp_path / "told").exists() else ""
    assert told.split() == ["2", "16.0", "qwen2.5-7b", "steps=1", "--resume"], (done.stdout + done.stderr)[-3000:]
    assert done.returncode == 7, "the run's own exit code"
    left = [read(process) for process in Path("/proc").glob("[0-9]*/cmdline") if f":{port}".encode() in read(process)]
    assert not left


def read(file):
    try:
        return file.read_bytes()
    except OSError:
        return b""
