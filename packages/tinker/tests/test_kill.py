"""`kill -9` of the server, of its training processes and of its sampling server, against an undisturbed twin."""

import json
import os
import random
import signal
import socket
import sqlite3
import subprocess
import sys
import threading
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import pytest
import tinker
import torch
from packages.tinker.tests.support import KEY
from tinker import types
from transformers import AutoModelForCausalLM

from rl_bench.waiting import until

pytestmark = [
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.usefixtures("collects_clients"),
]
ROWS = np.random.default_rng(0).integers(3, 40, (3, 12)).tolist()
KINDS = ("server", "launcher", "rank", "sampler")


def children(pid):
    """Descendants of a process, with their command lines."""
    found = {}
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            found[int(entry.name)] = (parent, (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode())
    known = {pid}
    while more := {each for each, (parent, _) in found.items() if parent in known} - known:
        known |= more
    return {each: found[each][1] for each in known - {pid}}


class Supervisor:
    """Starts the server again whenever it has ended, as systemd would."""

    def __init__(self, model, folder, *options):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.command = [
            sys.executable, "-m", "rl_tinker.cli", "serve", f"model.path={model}", "model.name=tiny",
            f"output_dir={folder}", f"port={self.port}", "dtype=float32", "max_model_len=256",
            *options,
        ]  # fmt: skip
        self.log = (folder.parent / f"{folder.name}.log").open("w")
        self.process = None
        self.is_ending = threading.Event()
        self.thread = threading.Thread(target=self.run, daemon=True)
        self.thread.start()

    def run(self):
        while not self.is_ending.is_set():
            self.process = subprocess.Popen(self.command, stdout=self.log, stderr=self.log)
            self.process.wait()

    def is_ready(self):
        with suppress(OSError):
            request = urllib.request.Request(f"{self.url}/api/v1/healthz", headers={"X-API-Key": KEY})
            return urllib.request.urlopen(request, timeout=5).status == 200
        return False

    def wait(self):
        until(self.is_ready, f"the server is ready; see {self.log.name}")

    def pid_of(self, kind):
        assert self.process is not None
        if kind == "server":
            return self.process.pid
        marks = {"launcher": "-m rl_tinker.ranks ", "rank": "rl_tinker/ranks/rank.py", "sampler": "rl_rollout"}
        found = [
            pid
            for pid, line in children(self.process.pid).items()
            if marks[kind] in line or (kind == "rank" and "rl_tinker.ranks.rank" in line)
        ]
        return found[0] if found else None

    def kill(self, kind):
        pid = self.pid_of(kind)
        if pid is not None:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return pid is not None

    def close(self):
        self.is_ending.set()
        if self.process is not None:
            self.process.terminate()
        self.thread.join(60)
        self.log.close()


@contextmanager
def supervised(model, folder, *options):
    supervisor = Supervisor(model, folder, *options)
    try:
        supervisor.wait()
        yield supervisor
    finally:
        supervisor.close()


def datum(tokens):
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={"target_tokens": np.array(tokens[1:]), "weights": np.ones(len(tokens) - 1, np.float32)},
    )


def train(url, done, rank):
    """Take steps until `done(number)`; returns the gradient norms, samples, and the state's files."""
    norms, samples = [], []
    with tinker.ServiceClient(base_url=url, api_key=KEY) as service:
        client = service.create_lora_training_client(base_model="tiny", rank=rank, seed=5).result()
        while not done(len(norms)):
            futures = [client.forward_backward([datum(row)], "cross_entropy") for row in ROWS]
            futures.append(client.optim_step(types.AdamParams(learning_rate=1e-3)))
            norms.append(futures[-1].result(900).metrics["grad_norm"])
        sampler = client.save_weights_and_get_sampling_client().result(300)
        params = types.SamplingParams(max_tokens=4, temperature=0)
        samples.append(sampler.sample(types.ModelInput.from_ints([5, 6, 7]), 1, params).result(300).sequences[0].tokens)
        path = client.save_state("end").result(300).path
    return norms, samples, path


def state_of(folder, path):
    """Bytes of weights and optimizer of a checkpoint."""
    found = checkpoint_folder(folder, path)
    names = ("adapter_model.safetensors", "optimizer.safetensors", "shard-00000.safetensors")
    return {name: (found / name).read_bytes() for name in names if (found / name).exists()}


def checkpoint_folder(folder, path):
    """Folder of a checkpoint."""
    with sqlite3.connect(folder / "journal.sqlite") as database:
        (body,) = database.execute("SELECT body FROM records WHERE id = ?", (path,)).fetchone()
    database.close()
    return folder / "checkpoints" / json.loads(body)["folder"]


def check_against_twin(tiny_model, tmp_path, num_kills, *options, rank=2):
    """Kill at random moments, and compare every step and the last state with an undisturbed run."""
    generator, killed, num_steps = random.Random(1), [], [0]
    with supervised(tiny_model, tmp_path / "killed", *options) as supervisor:
        stop = threading.Event()

        def harass():
            while len(killed) < num_kills:
                before = num_steps[0]
                if generator.random() < 0.5:  # else it may be in the middle of its start
                    while num_steps[0] == before and not stop.wait(0.02):
                        pass
                if stop.wait(generator.uniform(0.05, 3.0)):
                    return
                kind = KINDS[len(killed) % len(KINDS)]
                if supervisor.kill(kind):
                    killed.append(kind)
                    supervisor.log.write(f"kill {len(killed)}: {kind} after step {num_steps[0]}\n")
                    supervisor.log.flush()

        def is_done(number):
            num_steps[0] = number
            return len(killed) >= num_kills and number >= 4

        thread = threading.Thread(target=harass, daemon=True)
        thread.start()
        try:
            norms, samples, path = train(supervisor.url, is_done, rank)
        finally:
            stop.set()
            thread.join()
        state = state_of(tmp_path / "killed", path)
    with supervised(tiny_model, tmp_path / "twin", *options) as supervisor:
        twin = train(supervisor.url, lambda number: number >= len(norms), rank)
        assert norms == twin[0]
        assert samples == twin[1]
        assert state
        assert state == state_of(tmp_path / "twin", twin[2])
    assert len(killed) == num_kills


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.promise("After `kill -9` of any process at 200 random moments the optimizer state is an undisturbed run's")
def test_200_kills_leave_the_state_of_an_undisturbed_run(tiny_model, tmp_path):
    check_against_twin(tiny_model, tmp_path, int(os.environ.get("KILLS", "200")))


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_all_weights_survive_kills(tiny_model, tmp_path):
    check_against_twin(tiny_model, tmp_path, int(os.environ.get("KILLS_FULL", "8")), "training=full", rank=0)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_sampler_serves_all_trained_weights(tiny_model, tmp_path):
    prompt = [5, 6, 7]
    params = types.SamplingParams(max_tokens=6, temperature=0)

    def greedy(sampler):
        found = sampler.sample(types.ModelInput.from_ints(prompt), 1, params).result(300)
        return list(found.sequences[0].tokens)

    def expected(folder):
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        ids = torch.tensor([prompt])
        return model.generate(ids, max_new_tokens=6, do_sample=False, eos_token_id=None)[0, 3:].tolist()

    with (
        supervised(tiny_model, tmp_path / "one", "training=full") as supervisor,
        tinker.ServiceClient(base_url=supervisor.url, api_key=KEY) as service,
    ):
        client = service.create_lora_training_client(base_model="tiny", rank=0).result()
        assert not client.get_info().is_lora
        base = service.create_sampling_client(base_model="tiny").result()
        assert greedy(base) == expected(tiny_model)
        paths = []
        for name in ("first", "second"):
            for _ in range(4):
                client.forward_backward([datum(row) for row in ROWS], "cross_entropy")
                client.optim_step(types.AdamParams(learning_rate=0.02)).result(300)
            paths.append(client.save_weights_for_sampler(name).result(300).path)
        wanted = [expected(checkpoint_folder(tmp_path / "one", path)) for path in paths]
        assert wanted[0] != expected(tiny_model)
        samplers = [service.create_sampling_client(model_path=path).result() for path in paths]
        with ThreadPoolExecutor(9) as pool:  # turns of three sets of weights in one server
            found = list(pool.map(greedy, [*samplers, base] * 3))
        assert found == [*wanted, expected(tiny_model)] * 3
        with pytest.raises(tinker.APIStatusError, match="give rank=0"):
            service.create_lora_training_client(base_model="tiny", rank=2).result()


def scored(tokens, advantage):
    """Row of `importance_sampling`."""
    size = len(tokens) - 1
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={
            "target_tokens": np.array(tokens[1:]),
            "logprobs": np.full(size, -3.0, np.float32),
            "advantages": np.full(size, advantage, np.float32),
        },
    )


def tenant_run(url, key, rank, loss, rows):
    """Gradient norms of five steps of one tenant, all of whose requests are pipelined."""
    with tinker.ServiceClient(base_url=url, api_key=key) as service:
        client = service.create_lora_training_client(base_model="tiny", rank=rank, seed=rank).result()
        steps = []
        for _ in range(5):
            for row in rows:
                client.forward_backward([row], loss)
            steps.append(client.optim_step(types.AdamParams(learning_rate=1e-4)))
        return [each.result(300).metrics["grad_norm"] for each in steps]


def harmful_run(url):
    """Steps without a finite gradient, among a flood of passes; returns how many steps failed."""
    failed = 0
    with tinker.ServiceClient(base_url=url, api_key="tml-mallory") as service:
        client = service.create_lora_training_client(base_model="tiny", rank=8, seed=1).result()
        for _ in range(3):
            flood = [client.forward([datum(row)], "cross_entropy") for row in ROWS * 10]
            client.forward_backward([scored(ROWS[0], 3e38), scored(ROWS[1], 3e38)], "importance_sampling")
            try:
                client.optim_step(types.AdamParams(learning_rate=1.0)).result(300)
            except tinker.RequestFailedError:
                failed += 1
            for each in flood:
                each.result(300)
    return failed


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_tenants_at_once_equal_their_lone_runs(tiny_model, tmp_path):
    """Two tenants of different ranks and losses in shared passes, and a third that sends NaN and floods."""
    runs = {
        "tml-alice": (2, "cross_entropy", [datum(row) for row in ROWS]),
        "tml-bob": (4, "importance_sampling", [scored(row, 0.5) for row in ROWS]),
    }
    with supervised(tiny_model, tmp_path / "shared") as supervisor, ThreadPoolExecutor(3) as pool:
        harm = pool.submit(harmful_run, supervisor.url)
        shared = {key: pool.submit(tenant_run, supervisor.url, key, *run) for key, run in runs.items()}
        found = {key: each.result(600) for key, each in shared.items()}
        assert harm.result(600) == 3
    with supervised(tiny_model, tmp_path / "alone") as supervisor:
        for key, run in runs.items():
            assert found[key] == pytest.approx(tenant_run(supervisor.url, key, *run), rel=1e-6)
