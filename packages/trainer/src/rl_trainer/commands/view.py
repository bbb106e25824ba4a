"""`rl-view OUTPUT_DIR`: everything that a run left, as one HTML file that needs no network and no server.

Curves, phases, samples token by token, groups, prompts that never teach, staleness, failures, weights, and the
configuration next to another run's. Works on a run that was killed or is still going. A step's samples are a compressed
chunk that the browser unpacks when it is looked at; `--budget-mb` bounds them, evenly over the steps. With `--serve`
the page asks for a step's samples when they are looked at, all of them, and for new numbers every ten seconds.
"""

from __future__ import annotations

import argparse
import base64
import gzip
import json
import math
import re
import sys
from collections.abc import Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from operator import itemgetter
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any

import yaml

from rl_trainer.config.load import flat
from rl_trainer.errors import DataError, InputError
from rl_trainer.output_dir import write_whole
from rl_trainer.samples import read_samples, steps_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_PER_TOKEN = ("loss_mask", "rollout_logprobs", "old_logprobs", "ref_logprobs", "advantages", "weight_versions")
_PER_SAMPLE = ("group_id", "reward", "finish_reason", "weight_version_min", "weight_version_max", "num_turns")
_NO_SAMPLES = "The run kept no samples: tracking.keep_samples=true keeps them, `some` a few."
_MOST_TOKENS = 4096
"""Tokens of one sample that are shown."""


def main(argv: Sequence[str] | None = None) -> int:
    """Write the page and say where; returns the exit code: 2 if there is no run."""
    parser = argparse.ArgumentParser(prog="rl-view", description="One HTML file with everything that a run left.")
    parser.add_argument("run", help="output_dir of a run")
    parser.add_argument("--against", metavar="RUN", help="another run: its curves as well, and the keys that differ")
    parser.add_argument("--output", metavar="FILE", help="the page; OUTPUT_DIR/view.html by default")
    parser.add_argument("--budget-mb", type=float, default=64.0, help="most megabytes of samples in the page")
    parser.add_argument("--serve", type=int, metavar="PORT", help="serve it on loopback, and keep it up to date")
    arguments = parser.parse_args(argv)
    try:
        if arguments.serve is not None:
            _serve(arguments.serve, LivePage(arguments.run, arguments.against))
            return 0
        text = page(arguments.run, against=arguments.against, budget_bytes=int(arguments.budget_mb * 1e6))
    except InputError as error:
        print(f"rl-view: {error}", file=sys.stderr)
        return 2
    file = Path(arguments.output or Path(arguments.run) / "view.html")
    write_whole(file, text)
    print(f"{file}, {len(text) / 1e6:.1f} MB")
    return 0


def page(run: str | Path, *, against: str | Path | None = None, budget_bytes: int = 64_000_000) -> str:
    """The page of a run.

    Where samples take more than `budget_bytes`, steps are left out evenly.

    Raises:
        DataError: the folder holds no run.
    """
    about = _about(Path(run), against)
    chunks, notes, prompts = _chunks(Path(run), budget_bytes)
    about |= {"sampleSteps": [step for step, _ in chunks], "notes": [*about["notes"], *notes], "prompts": prompts}
    scripts = "".join(
        f'<script type="text/plain" id="samples-{step}">{base64.b64encode(chunk).decode()}</script>\n'
        for step, chunk in chunks
    )
    return _filled(about, scripts)


class LivePage:
    """The page of a run that goes on: its parts as they are asked for.

    Raises:
        DataError: a folder holds no run.
    """

    def __init__(self, run: str | Path, against: str | Path | None = None) -> None:
        self._run, self._against = Path(run), against
        self._piece: Callable[[int], str] | None = None
        self._seen, self._counted = dict[str, list[Any]](), set[int]()
        self.about()

    def about(self) -> dict[str, Any]:
        """Everything but samples; of those that are new, prompts and rewards alone are read."""
        about = _about(self._run, self._against)
        steps = steps_of(self._run)
        for step in (step for step in steps if step not in self._counted):
            columns = ["group_id", "prompt", "reward"]
            try:
                _note_prompts(self._seen, read_samples(self._run, steps=[step], columns=columns).to_pylist())
            except (DataError, OSError, ValueError) as error:
                about["notes"].append(f"The samples of step {step} cannot be read: {error}")
            self._counted.add(step)
        about["notes"] += [] if steps else [_NO_SAMPLES]
        return about | {"live": True, "sampleSteps": steps, "prompts": _never(self._seen)}

    def html(self) -> str:
        """The page, without samples."""
        return _filled(self.about(), "")

    def samples(self, step: int) -> bytes:
        """Those of one step, gzip of JSON.

        Raises:
            DataError: there are none.
        """
        self._piece = self._piece or _pieces(self._run)
        return _compressed(read_samples(self._run, steps=[step]).to_pylist(), self._piece)


def _about(run: Path, against: str | Path | None) -> dict[str, Any]:
    about: dict[str, Any] = {**overview(run), "live": False}
    if against is not None:
        about["other"] = {"name": Path(against).name, "curves": curves(records(Path(against)))}
        about["difference"] = difference(run, Path(against))
    return about


def _receipts(line: Mapping[str, Any]) -> Iterator[list[Any]]:
    """[step, receipt] of the weights that were sent after a step; of several policies one each, with its name."""
    step, weights = line["step"], line["weights"]
    if "version" in weights:
        yield [step, weights]
    else:
        yield from ([f"{step}, {policy}", receipt] for policy, receipt in weights.items())


def _filled(about: Mapping[str, Any], scripts: str) -> str:
    template = (files("rl_trainer") / "view.html").read_text()
    return template.replace("<!--SAMPLES-->", scripts).replace("/*DATA*/null", _script(about))


def _script(value: Any) -> str:
    """JSON that is safe inside a script."""
    return json.dumps(_finite(value), separators=(",", ":")).replace("</", "<\\/").replace("<!--", "<\\!--")


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _finite(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def overview(run: Path) -> dict[str, Any]:
    """Overview of a run from its small files."""
    found = records(run)
    config, summary = _yaml(run / "config.yaml"), _json(run / "summary.json")
    notes: list[str] = []
    if summary is None:
        last = found[-1]["step"] if found else 0
        notes.append(f"The run has no summary: it was killed, or still goes on. Its last step is {last}.")
    return {
        "name": config.get("name", run.name),
        "folder": run.name,
        "config": config,
        "summary": summary,
        "steps": config.get("steps"),
        "curves": curves(found),
        "phases": [[line["step"], line.get("phase_s", {})] for line in found],
        "staleness": [
            [line["step"], {n[10:]: v for n, v in line.get("metrics", {}).items() if re.fullmatch(r"staleness_\d+", n)}]
            for line in found
        ],
        "failures": [[line["step"], *failed] for line in found if (failed := _failed(line))[0]],
        "weights": [each for line in found if line.get("weights") for each in _receipts(line)],
        "notes": notes,
    }


def _failed(line: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    """Failures of a step by kind, errors of tools among them, and the message of one."""
    errors = line.get("metrics", {}).get("tool_errors")
    shown = {"errors that a tool answered": errors} if errors else {}
    return {**line.get("failures", {}), **shown}, line.get("last_failure") or line.get("last_tool_error", "")


def records(run: Path) -> list[dict[str, Any]]:
    """The lines of `metrics.jsonl`, the last of each step; one that a kill tore is passed over.

    Raises:
        DataError: there is none.
    """
    file = run / "metrics.jsonl"
    if not file.is_file():
        raise DataError(f"{run} has no metrics.jsonl, so it is not an output_dir of a run; give the folder of one")
    by_step: dict[int, dict[str, Any]] = {}
    for line in file.read_text(errors="replace").splitlines():
        try:
            found = json.loads(line)
        except ValueError:
            continue
        if isinstance(found, dict) and "step" in found:
            known = by_step.get(found["step"], {})
            by_step[found["step"]] = {**known, **{k: v for k, v in found.items() if v is not None or k not in known}}
    return [by_step[step] for step in sorted(by_step)]


def curves(found: Sequence[Mapping[str, Any]]) -> dict[str, list[list[float]]]:
    """Curves by name: (step, value) of every number in the lines."""
    lines: dict[str, list[list[float]]] = {}
    for record in found:
        of_training = ("reward", "num_tokens", "num_truncated", "tokens_per_s", "wall_s")
        names = ("accuracy", "eval_reward", *(of_training if record.get("reward") is not None else ()))
        numbers = {name: record.get(name) for name in names}
        for name, value in (numbers | record.get("metrics", {})).items():
            if isinstance(value, (int, float)) and not isinstance(value, bool):
                lines.setdefault(name, []).append([record["step"], value])
    return lines


def difference(run: Path, other: Path) -> list[tuple[str, Any, Any]]:
    """(key, value here, value there) of the keys in which the configurations differ."""
    here, there = flat(_yaml(run / "config.yaml")), flat(_yaml(other / "config.yaml"))
    return [(key, here.get(key), there.get(key)) for key in sorted({*here, *there}) if here.get(key) != there.get(key)]


def _yaml(file: Path) -> dict[str, Any]:
    return (yaml.safe_load(file.read_text()) or {}) if file.is_file() else {}


def _json(file: Path) -> Any:
    try:
        return json.loads(file.read_text())
    except (OSError, ValueError):
        return None


def _chunks(run: Path, budget_bytes: int) -> tuple[list[tuple[int, bytes]], list[str], list[list[Any]]]:
    """(step, compressed samples), messages, and the prompts whose groups never differed in reward."""
    there, notes = steps_of(run), list[str]()
    if not there:
        return [], [_NO_SAMPLES], []
    piece, seen = _pieces(run), dict[str, list[Any]]()
    sizes = {step: (run / "samples" / f"step-{step:06d}.parquet").stat().st_size for step in there}
    wanted = _evenly(there, sizes, budget_bytes)
    chunks, spent = list[tuple[int, bytes]](), 0
    for step in wanted:
        try:
            rows = read_samples(run, steps=[step]).to_pylist()
        except (DataError, OSError, ValueError) as error:
            notes.append(f"The samples of step {step} cannot be read: {error}")
            continue
        _note_prompts(seen, rows)
        chunk = _compressed(rows, piece)
        if spent + len(chunk) * 4 / 3 > budget_bytes:
            notes.append(f"From step {step} on samples are left out: --budget-mb={budget_bytes / 1e6:g} is full.")
            break
        spent += len(chunk) * 4 // 3
        chunks.append((step, chunk))
    if len(wanted) < len(there):
        notes.append(f"Samples of {len(wanted)} of {len(there)} steps are in this page (--budget-mb).")
    return chunks, notes, _never(seen)


def _never(seen: Mapping[str, Sequence[Any]]) -> list[list[Any]]:
    never = [[prompt, groups, rewards] for prompt, (groups, taught, rewards) in seen.items() if not taught]
    return sorted(never, key=itemgetter(1), reverse=True)[:500]


def _compressed(rows: Sequence[Mapping[str, Any]], piece: Callable[[int], str]) -> bytes:
    return gzip.compress(json.dumps(_finite([_sample(row, piece) for row in rows])).encode(), 6)


def _evenly(steps: Sequence[int], sizes: Mapping[int, int], budget_bytes: int) -> list[int]:
    """Steps whose files are about the budget together, the first and the last among them."""
    share = min(budget_bytes / max(sum(sizes.values()), 1), 1.0)
    count = max(math.ceil(len(steps) * share), 1)
    return sorted({steps[round(at * (len(steps) - 1) / max(count - 1, 1))] for at in range(count)})


def _note_prompts(seen: dict[str, list[Any]], rows: Sequence[Mapping[str, Any]]) -> None:
    groups: dict[Any, list[Mapping[str, Any]]] = {}
    for row in rows:
        groups.setdefault(row.get("group_id"), []).append(row)
    for members in groups.values():
        rewards = [row["reward"] for row in members]
        known = seen.setdefault(members[0]["prompt"], [0, False, []])
        known[0] += 1
        known[1] = known[1] or len({round(reward, 9) for reward in rewards}) > 1
        known[2].append(rewards[0])


def _sample(row: Mapping[str, Any], piece: Callable[[int], str]) -> dict[str, Any]:
    made = {name: row[name] for name in _PER_SAMPLE if row.get(name) is not None}
    ids = (row.get("completion_token_ids") or [])[:_MOST_TOKENS]
    made |= {"prompt": row["prompt"], "completion": row["completion"], "tokens": [piece(each) for each in ids]}
    for name in _PER_TOKEN:
        if isinstance(values := row.get(name), list) and len(values) >= len(ids):
            made[name] = [round(value, 4) if isinstance(value, float) else value for value in values[: len(ids)]]
    return made


def _pieces(run: Path) -> Callable[[int], str]:
    """Text of token ids; the id itself where the run's tokenizer is not found."""
    config = _yaml(run / "config.yaml")
    own = (config.get("model") or {}).get("path")
    folders = [run / "model", *sorted(run.glob("checkpoint-*/model")), *([Path(own)] if own else [])]
    file = next((folder / "tokenizer.json" for folder in folders if (folder / "tokenizer.json").is_file()), None)
    known: dict[int, str] = {}
    if file is None:
        return lambda token_id: f"⟨{token_id}⟩"
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(file))

    def piece(token_id: int) -> str:
        if token_id not in known:
            known[token_id] = tokenizer.decode([token_id], skip_special_tokens=False) or f"⟨{token_id}⟩"
        return known[token_id]

    return piece


def _serve(port: int, live: LivePage) -> None:
    lock = Lock()  # the browser asks for several things at a time

    def answer(path: str) -> tuple[str, bytes]:
        name = path.partition("?")[0].strip("/")
        if name == "":
            return "text/html; charset=utf-8", live.html().encode()
        if name == "data.json":
            return "application/json", json.dumps(_finite(live.about())).encode()
        if name.startswith("samples/") and name.removeprefix("samples/").isdecimal():
            return "application/gzip", live.samples(int(name.removeprefix("samples/")))
        raise DataError(f"there is no {path}")

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            try:
                with lock:
                    kind, body = answer(self.path)
            except DataError as error:
                self.send_error(404, str(error))
                return
            self.send_response(200)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - http.server's name
            pass

    with ThreadingHTTPServer(("127.0.0.1", port), Handler) as server:
        print(f"http://127.0.0.1:{server.server_port}, Ctrl-C ends it", flush=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            return


if __name__ == "__main__":
    raise SystemExit(main())
