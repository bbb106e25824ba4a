"""The page of a run: whole or killed, with or without samples, in a real browser where there is one."""

import base64
import gzip
import json
import re
import shutil
import subprocess
import threading
import urllib.error
import urllib.request
from http.server import ThreadingHTTPServer

import pytest
import torch
import yaml

from rl_trainer.commands import view
from rl_trainer.errors import DataError
from rl_trainer.samples import FOLDER, file_of, write_samples

RECEIPT = {
    "digest": "00c0ffee",
    "tensors": 3,
    "bytes": 2e9,
    "wire_bytes": 5e6,
    "confirmed": 2,
    "pause_s": 0.1,
    "wall_s": 1,
}
TOOL = "train.jsonl, row 7: lookup: KeyError: 'x'"
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


def make_run(folder, *, steps=6, samples=(1, 3, 5), seed=0, size=3):
    folder.mkdir()
    (folder / "config.yaml").write_text(
        yaml.safe_dump({"name": "sums", "seed": seed, "steps": 10, "data": {"path": "d"}})
    )
    lines = [{"step": 0, "reward": None, "accuracy": 0.1, "metrics": {}, "phase_s": {"eval": 1.0}, "failures": {}}]
    for step in range(1, steps + 1):
        metrics = {"grad_norm": 1.0 / step, "staleness_0": 0.75, "staleness_2": 0.25, "staleness_mean": 0.5}
        phases = {"generate": 1.0, "update": 0.5, "weight_sync": 0.1}
        line = {"step": step, "reward": step / 10, "accuracy": None, "num_tokens": 50, "tokens_per_s": 9.0}
        line |= {"wall_s": 2.0, "metrics": metrics, "phase_s": phases, "failures": {"timeout": 2} if step == 2 else {}}
        line |= {
            "last_failure": "no answer within 60 s" if step == 2 else "",
            "weights": RECEIPT | {"version": step + 1},
        }
        lines.append(line)
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (folder / "metrics.jsonl").write_text(text + '{"step": 7, "reward": 0.')  # torn by a kill
    (folder / FOLDER).mkdir()
    for step in samples:
        ids = torch.nested.nested_tensor_from_jagged(torch.arange(4 * size), torch.arange(0, 4 * size + 1, size))
        values = torch.nested.nested_tensor_from_jagged(-torch.rand(4 * size), ids.offsets())
        write_samples(
            file_of(folder / FOLDER, step),
            {
                "completion_token_ids": ids, "rollout_logprobs": values, "old_logprobs": values - 0.1,
                "advantages": values,
                "loss_mask": torch.ones_like(ids), "group_id": torch.tensor([1, 1, 2, 2]),
                "prompt": ["</script><b>hi", "</script><b>hi", "hard", "hard"], "completion": ["x", "y", "z", "w"],
                "reward": torch.tensor([0.0, 1.0, 0.0, 0.0]), "finish_reason": ["stop"] * 4,
                "weight_version_min": torch.full((4,), step), "weight_version_max": torch.full((4,), step),
            },
        )  # fmt: skip
    return folder


def data_of(text):
    return json.loads(re.search(r"const data = (.*);\n", text)[1].replace("<\\/", "</"))


def samples_of(text, step):
    chunk = re.search(rf'id="samples-{step}">([^<]*)<', text)[1]
    return json.loads(gzip.decompress(base64.b64decode(chunk)))


@pytest.mark.promise("`rl-view` shows a run that was killed up to its last whole line")
def test_a_killed_run_is_shown_up_to_its_last_whole_line(tmp_path):
    data = data_of(view.page(make_run(tmp_path / "run")))
    assert data["curves"]["reward"] == [[step, step / 10] for step in range(1, 7)]
    assert data["curves"]["accuracy"] == [[0, 0.1]]
    assert "wall_s" in data["curves"]
    assert data["curves"]["wall_s"][0][0] == 1, "an evaluation is no training step"
    assert any("was killed, or still goes on. Its last step is 6" in told for told in data["notes"])
    assert data["failures"] == [[2, {"timeout": 2}, "no answer within 60 s"]]
    assert [(step, weights["version"]) for step, weights in data["weights"]] == [(n, n + 1) for n in range(1, 7)]
    assert data["staleness"][1] == [1, {"0": 0.75, "2": 0.25}]


def test_samples_are_chunks_of_their_own_token_by_token(tmp_path):
    text = view.page(make_run(tmp_path / "run"))
    assert data_of(text)["sampleSteps"] == [1, 3, 5]
    first = samples_of(text, 3)[0]
    assert first["tokens"] == ["⟨0⟩", "⟨1⟩", "⟨2⟩"]
    assert len(first["rollout_logprobs"]) == len(first["advantages"]) == 3
    assert (first["reward"], first["weight_version_min"]) == (0.0, 3)
    assert "</script><b>" not in text.partition("const data")[2].partition(";\n")[0], "a prompt cannot end the script"


def test_prompts_that_never_teach_are_found(tmp_path):
    assert data_of(view.page(make_run(tmp_path / "run")))["prompts"] == [["hard", 3, [0.0, 0.0, 0.0]]]


@pytest.mark.process
def test_a_budget_leaves_steps_out_evenly_and_says_so(tmp_path):
    run = make_run(tmp_path / "run", steps=9, samples=range(1, 10), size=400)
    whole = view.page(run)
    small = view.page(run, budget_bytes=sum(f.stat().st_size for f in (run / FOLDER).iterdir()) // 3)
    steps = data_of(small)["sampleSteps"]
    assert 1 <= len(steps) <= 4
    assert steps[0] == 1
    assert len(small) < len(whole) / 2
    assert any("--budget-mb" in told for told in data_of(small)["notes"])


def test_two_runs_are_told_apart_by_their_keys(tmp_path):
    here, there = make_run(tmp_path / "a", seed=1), make_run(tmp_path / "b", seed=2)
    data = data_of(view.page(here, against=there))
    assert data["difference"] == [["seed", 1, 2]]
    assert data["other"]["curves"]["reward"][0] == [1, 0.1]


def test_a_folder_without_a_run_and_a_run_without_samples(tmp_path, capsys):
    with pytest.raises(DataError, match="has no metrics.jsonl"):
        view.page(tmp_path)
    assert view.main([str(tmp_path)]) == 2
    assert "rl-view: " in capsys.readouterr().err
    run = make_run(tmp_path / "run", samples=())
    assert view.main([str(run)]) == 0
    assert str(run / "view.html") in capsys.readouterr().out
    assert any("tracking.keep_samples=true" in told for told in data_of((run / "view.html").read_text())["notes"])


@pytest.mark.promise("`rl-view --serve` has new steps, and reads samples when they are looked at")
@pytest.mark.process
def test_a_served_page_shows_new_steps_and_loads_samples_late(tmp_path, monkeypatch):
    run, servers = make_run(tmp_path / "run", size=400), []

    class Noted(ThreadingHTTPServer):
        def __init__(self, *args):
            super().__init__(*args)
            servers.append(self)

    monkeypatch.setattr(view, "ThreadingHTTPServer", Noted)
    thread = threading.Thread(target=view.main, args=([str(run), "--serve", "0"],))
    thread.start()
    try:
        while not servers:
            thread.join(0.01)

        def get(path):
            with urllib.request.urlopen(f"http://127.0.0.1:{servers[0].server_port}/{path}", timeout=30) as answer:
                return answer.read()

        page = get("").decode()
        data = data_of(page)
        assert data["live"] is True
        assert len(data["curves"]["reward"]) == 6
        assert data["sampleSteps"] == [1, 3, 5], "whatever they weigh"
        assert 'id="samples-' not in page, "they are asked for"
        assert len(json.loads(gzip.decompress(get("samples/3")))) == 4
        with pytest.raises(urllib.error.HTTPError, match="404"):
            get("samples/4")
        with (run / "metrics.jsonl").open("a") as file:
            file.write('\n{"step": 8, "reward": 0.9, "metrics": {}}\n')
        shutil.copy(file_of(run / FOLDER, 5), file_of(run / FOLDER, 8))
        fresh = json.loads(get("data.json"))
        assert fresh["curves"]["reward"][-1] == [8, 0.9]
        assert fresh["sampleSteps"] == [1, 3, 5, 8]
        assert fresh["prompts"] == [["hard", 4, [0.0] * 4]], "counted once for each step"
    finally:
        servers[0].shutdown()
        thread.join(30)


@pytest.mark.integration
@pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium on the path")
@pytest.mark.parametrize(
    ("tab", "wanted"),
    [
        ("curves", ["grad_norm", '<path d="M']),
        ("phases", ["generate", "<rect"]),
        ("samples", ["group 1", "teaches nothing", "⟨0⟩", "background:"]),
        ("prompts", ["hard"]),
        ("staleness", ["25.0%"]),
        ("failures", ["timeout: 2", "no answer within 60 s"]),
        ("weights", ["00c0ffee", "2.00 GB", "5.0 MB"]),
        ("configuration", ["data.path", "What differs from"]),
    ],
)
def test_a_browser_shows_every_tab(tmp_path, tab, wanted):
    here, there = make_run(tmp_path / "a"), make_run(tmp_path / "b", seed=3)
    page = tmp_path / "view.html"
    page.write_text(view.page(here, against=there))
    line = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}/profile"]
    line += ["--virtual-time-budget=5000", "--enable-logging=stderr", "--dump-dom", f"{page.as_uri()}#{tab}"]
    ended = subprocess.run(line, capture_output=True, text=True, timeout=120, check=True)
    section = ended.stdout.partition(f'id="tab-{tab}"')[2].partition("</section>")[0]
    assert [each for each in wanted if each not in section] == []
    assert "Uncaught" not in ended.stderr


def test_errors_of_tools_are_listed_with_the_failures():
    lines = [{"step": 1, "failures": {}}, {"step": 2, "metrics": {"tool_errors": 3.0}, "last_tool_error": TOOL}]
    assert [view._failed(line) for line in lines] == [({}, ""), ({"errors that a tool answered": 3.0}, TOOL)]
