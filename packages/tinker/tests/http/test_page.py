"""The page in a real Chromium, and what other tenants do not see."""

import asyncio
import json
import shutil
import subprocess
import urllib.error
import urllib.request

import pytest
from packages.tinker.tests.support import running

from rl_tinker import journal as db
from rl_tinker.service.tenants import key_digest
from rl_tinker.types import AdapterSpec, Model


def numbers(url, key=""):
    request = urllib.request.Request(f"{url}/page.json", headers={"X-API-Key": key})
    return json.load(urllib.request.urlopen(request, timeout=10))


def put_run(server, tenant):
    """A run with a curve, as training leaves it."""
    model = Model(
        id=f"{tenant}-1:train:0",
        session="s",
        tenant=tenant,
        created=1.0,
        last_request=1.0,
        adapter=AdapterSpec(),
        step=3,
    )
    store = server.store
    points = [db.add_point(model.id, step, 0.0, 12.0 / (step + 1), 6) for step in range(4)]
    asyncio.run(store.journal.write(db.put(model), *points))
    store.apply([model])


def test_a_tenant_sees_its_own_runs_alone(tiny_model, tmp_path):
    keys = tmp_path / "keys.toml"
    table = '[[tenant]]\nname = "{}"\nkey_sha256 = "{}"\nmax_pending = 9\n'
    keys.write_text("".join(table.format(name, key_digest(f"tml-{name}")) for name in ("alice", "bob")))
    with running(tmp_path / "out", tiny_model, keys=str(keys)) as server:
        put_run(server, "alice")
        mine, other = numbers(server.url, "tml-alice"), numbers(server.url, "tml-bob")
        assert [each["id"] for each in mine["runs"]] == ["alice-1:train:0"]
        assert mine["runs"][0]["curve"] == [[0, 2.0], [1, 1.0], [2, 4 / 6], [3, 0.5]]
        assert (mine["max_pending"], other["runs"]) == (9, [])
        with pytest.raises(urllib.error.HTTPError, match="401"):
            numbers(server.url, "tml-eve")


@pytest.mark.process
@pytest.mark.skipif(shutil.which("chromium") is None, reason="there is no chromium on the path")
def test_the_page_shows_runs_and_curves_in_chromium(tiny_model, tmp_path):
    with running(tmp_path / "out", tiny_model) as server:
        put_run(server, "alice")
        command = [
            "chromium", "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}/browser",
            "--virtual-time-budget=4000", "--window-size=1100,500", "--dump-dom", server.url,
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
        assert "alice-1:train:0" in done.stdout
        assert "<title>from 2.000 to 0.5000</title>" in done.stdout
        assert "requests queued" in done.stdout
        assert 'id="form" hidden' in done.stdout
