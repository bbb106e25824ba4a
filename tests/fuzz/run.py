"""Coverage-guided fuzzing of everything that reads what others wrote: sockets, files, and what a policy says.

    uv sync --group dev --group fuzz
    uv run python tests/fuzz/run.py                         # every target for a minute
    uv run python tests/fuzz/run.py proxy_chat --seconds 600 --keep
    uv run python tests/fuzz/run.py ckpt_messages --runs 1000000
    uv run python tests/fuzz/run.py --replay                # the seeds and kept inputs alone

A target is a file of `targets/`: `seeds()`, `one(data)`, and `EXPECTED`, the errors that its subject promises. Another
error, a call of more than 10 s or a process of more than 2 GiB is a finding: its input is left in `tests/fuzz/findings`.
Executions are added up by target and day in `benchmarks/results/fuzz.json`. With `--keep` inputs that reach new code are added
to `corpus/TARGET.jsonl`, up to 20 small ones: a line has an input as `text`, or as `base64`. Native code is reached through its Python face; it is not instrumented.
"""

import argparse
import base64
import hashlib
import json
import platform
import re
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from importlib import import_module, util
from pathlib import Path

HERE = Path(__file__).parent
RESULTS = HERE.parents[1] / "benchmarks" / "results" / "fuzz.json"
MAX_INPUT_BYTES, MAX_KEPT, MAX_KEPT_BYTES = 4096, 20, 1024
PACKAGES = [
    "rl_agent",
    "rl_ckpt",
    "rl_csrc",
    "rl_engine",
    "rl_rollout",
    "rl_tq",
    "rl_tq_transfer_queue",
    "rl_trainer",
    "judge",
    "values",
]


def targets():
    """Their names."""
    return sorted(path.stem for path in (HERE / "targets").glob("[a-z]*.py"))


def load(name):
    """The module of a target."""
    folder = str(HERE / "targets")
    if folder not in sys.path:
        sys.path.insert(0, folder)
    return import_module(name)


def inputs(name):
    """Seeds and kept inputs of a target."""
    return [*load(name).seeds(), *_kept(name)]


def _kept(name):
    """Kept inputs of a target, from its corpus file."""
    file = HERE / "corpus" / f"{name}.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    return [row["text"].encode() if "text" in row else base64.b64decode(row["base64"]) for row in rows]


def _row(data):
    """An input as a line of a corpus file."""
    try:
        return json.dumps({"text": data.decode()}) + "\n"
    except UnicodeDecodeError:
        return json.dumps({"base64": base64.b64encode(data).decode()}) + "\n"


def call(target, data):
    """Give a target an input; raises what it does not promise."""
    try:
        target.one(data)
    except target.EXPECTED:
        return


def fuzz(name, options):
    """Fuzz in this process, by libFuzzer's options; does not return."""
    import atheris

    with atheris.instrument_imports(include=PACKAGES, enable_loader_override=False):
        target = load(name)
    atheris.Setup([name, *options], lambda data: call(target, data))
    atheris.Fuzz()


def run(name, *, seconds, runs, keep):
    """Fuzz a target in a process of its own.

    Returns:
        Executions, seconds, and what it said if it found something.
    """
    findings = HERE / "findings"
    findings.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        corpus = Path(folder) / "corpus"
        corpus.mkdir()
        for data in inputs(name):
            (corpus / hashlib.sha1(data).hexdigest()).write_bytes(data)
        limits = [f"-max_total_time={seconds}"] if runs is None else [f"-runs={runs}"]
        options = [
            *limits,
            f"-max_len={MAX_INPUT_BYTES}",
            "-timeout=10",
            "-rss_limit_mb=2048",
            "-print_final_stats=1",
            f"-artifact_prefix={findings}/{name}-",
            str(corpus),
        ]
        start = time.monotonic()
        command = [sys.executable, __file__, "--child", name, *options]
        done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, errors="replace")
        taken = time.monotonic() - start
        if keep and done.returncode == 0:
            _keep(name, corpus)
    counted = re.search(r"number_of_executed_units:\s*(\d+)", done.stderr) or re.search(r"Done (\d+)", done.stderr)
    at = [int(found) for found in re.findall(r"^#(\d+)\s", done.stderr, re.MULTILINE)]
    executions = int(counted[1]) if counted else max(at, default=0)
    return executions, taken, "" if done.returncode == 0 else done.stderr[-4000:]


def _keep(name, corpus):
    """Add the smallest inputs of a run to the kept ones."""
    kept, seeds = _kept(name), load(name).seeds()
    for data in sorted((path.read_bytes() for path in corpus.iterdir()), key=len):
        if len(kept) < MAX_KEPT and len(data) <= MAX_KEPT_BYTES and data not in (*kept, *seeds):
            kept.append(data)
    (HERE / "corpus" / f"{name}.jsonl").write_text("".join(_row(data) for data in kept))


def record(name, executions, seconds):
    """Add to the counts of a target, by day."""
    found = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"total": {}, "days": []}
    day, machine = datetime.now(UTC).date().isoformat(), platform.machine()
    same = [each for each in found["days"] if (each["date"], each["target"], each["machine"]) == (day, name, machine)]
    if not same:
        same = [{"date": day, "target": name, "machine": machine, "executions": 0, "seconds": 0.0}]
        found["days"] += same
    same[0]["executions"] += executions
    same[0]["seconds"] = round(same[0]["seconds"] + seconds, 1)
    found["total"][name] = found["total"].get(name, 0) + executions
    found["total"] = dict(sorted(found["total"].items()))
    RESULTS.write_text(json.dumps(found, indent=1) + "\n")


def main():
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("targets", nargs="*", choices=[*targets(), []], metavar="TARGET", help=", ".join(targets()))
    parser.add_argument("--seconds", type=int, default=60, help="per target")
    parser.add_argument("--runs", type=int, help="executions per target, instead of seconds")
    parser.add_argument("--keep", action="store_true", help="put what reaches new code into the corpus")
    parser.add_argument("--replay", action="store_true", help="only the seeds and kept inputs, without atheris")
    parser.add_argument("--no-record", action="store_true", help="leave benchmarks/results/fuzz.json as it is")
    given = parser.parse_args()
    if given.replay:
        for name in given.targets or targets():
            for data in inputs(name):
                call(load(name), data)
            print(f"{name:20s} ok", flush=True)
        return
    if util.find_spec("atheris") is None:
        sys.exit(
            "fuzzing needs atheris: uv sync --group dev --group fuzz (it has wheels for CPython 3.11 to 3.13 on Linux)"
        )
    num_found = 0
    for name in given.targets or targets():
        executions, taken, said = run(name, seconds=given.seconds, runs=given.runs, keep=given.keep)
        if not given.no_record:
            record(name, executions, taken)
        num_found += bool(said)
        print(f"{name:20s} {executions:>12,} executions {taken:8.1f} s  {'FOUND' if said else 'ok'}", flush=True)
        if said:
            print(said)
    sys.exit(1 if num_found else 0)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        fuzz(sys.argv[2], sys.argv[3:])
    main()
