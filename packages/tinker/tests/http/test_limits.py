"""What the server does not have, what it cancels, and what one tenant may ask of it, over HTTP as the SDK's wire."""

import asyncio
import http.client
import json
import threading
from urllib.parse import urlsplit

import numpy as np
import pytest
from packages.tinker.tests.service.test_durability import body
from packages.tinker.tests.support import KEY, FakeGroup, FakeReplicas, running

from rl_bench.waiting import until
from rl_tinker.service.tenants import key_digest
from rl_tinker.wire.protobuf import message

OTHER = "tml-bob"
PROMPT = {"chunks": [{"tokens": [5, 6]}]}


class GatedReplicas(FakeReplicas):
    """Replicas whose samples of a prompt that begins with 9 wait until the gate is opened."""

    def __init__(self, gate):
        super().__init__()
        self.gate = gate

    async def generate(self, request):
        if request.prompt_token_ids[0] == 9:
            await asyncio.to_thread(self.gate.wait, 30.0)
        return await super().generate(request)


class Client:
    """Plain HTTP client of one tenant, with a session and a model."""

    def __init__(self, server, key=KEY, lora=None):
        self.host, self.key = urlsplit(server.url).netloc, key
        self.session = self.post("/create_session", {})[1]["session_id"]
        self.lora = {"rank": 2, "seed": 1} if lora is None else lora

    def post(self, path, given):
        connection = http.client.HTTPConnection(self.host, timeout=30)
        content = given if isinstance(given, bytes) else json.dumps(given).encode()
        connection.request("POST", f"/api/v1{path}", content, {"X-API-Key": self.key})
        answer = connection.getresponse()
        self.headers, text = answer.headers, answer.read()
        connection.close()
        is_json = answer.headers.get("Content-Type", "").startswith("application/json")
        return answer.status, json.loads(text) if text and is_json else text

    def create(self, number=0, **more):
        request = {"session_id": self.session, "model_seq_id": number, "base_model": "tiny", "lora_config": self.lora}
        return self.post("/create_model", request | more)

    def ended(self, answer):
        """Result of a future."""
        status, future = answer
        assert status == 200, future
        return self.post("/retrieve_future", {"request_id": future["request_id"]})[1]

    def passed(self, model, seq, num_rows=1):
        request = message("ForwardBackwardRequest").FromString(body(1.0, model))
        request.seq_id = seq
        request.data.extend([request.data[0]] * (num_rows - 1))
        return self.post("/forward_backward", request.SerializeToString())

    def sample(self, **more):
        return self.post(
            "/asample", {"prompt": PROMPT, "sampling_params": {"max_tokens": 1}, "base_model": "tiny"} | more
        )


@pytest.fixture
def gate():
    gate = threading.Event()
    yield gate
    gate.set()


@pytest.fixture
def server(tiny_model, tmp_path, gate):
    keys = tmp_path / "keys.toml"
    quotas = "max_pending = 4\nmax_samplers = 3\nmax_pending_mib = 0.001\n"
    keys.write_text(
        f"[[tenant]]\nname = 'alice'\nkey_sha256 = '{key_digest(KEY)}'\n{quotas}"
        f"[[tenant]]\nname = 'bob'\nkey_sha256 = '{key_digest(OTHER)}'\n"
    )
    replicas = GatedReplicas(gate)
    with running(tmp_path / "s", tiny_model, replicas=replicas, model_name="tiny", keys=str(keys)) as server:
        yield server
        gate.set()


@pytest.fixture(scope="module")
def shared(tiny_model, tmp_path_factory):
    """One server for the tests whose requests leave nothing in it; every key is a tenant of its own."""
    with running(tmp_path_factory.mktemp("shared"), tiny_model, model_name="tiny") as server:
        yield server


@pytest.mark.parametrize(
    ("path", "given"),
    [
        ("/no_such_endpoint", {}),
        ("/create_model", {"lora_config": None}),
        ("/create_model", {"optimizer_config": {"type": "muon"}}),
        ("/optim_step", {"model_id": "m", "optimizer_params": {"lr": 1}}),
        ("/save_weights_for_sampler", {"model_id": "m", "kind": "inflight"}),
        ("/save_weights_external", {"model_id": "m", "path": "x", "age_encryption_recipients": ["a"]}),
        ("/load_weights", {"path": "tinker://x", "optimizer": True, "weights_access_token": "t"}),
        ("/asample", {"target_prompt_logprobs": [1]}),
        ("/asample", {"prompt_alt_tokens_k": 2}),
        ("/asample", {"record_stability_info": True}),
        ("/asample", {"prompt": {"chunks": [{"type": "image", "tokens": []}]}}),
    ],
)
def test_what_the_server_does_not_have_is_400(shared, path, given):
    client = Client(shared)
    if path == "/create_model":
        status, answer = client.create(**given)
    elif path == "/asample":
        status, answer = client.sample(**given)
    else:
        status, answer = client.post(path, given)
    assert (status, answer["type"]) == (400, "UnsupportedError")


@pytest.mark.parametrize(
    ("path", "given", "told"),
    [
        ("/create_model", {"lora_config": {"rank": 300}}, "lora_config.rank=300 must be from 1 to max_rank=256"),
        ("/create_model", {"lora_config": {"rank": 2, "seed": 2**70}}, "at `$.lora_config.seed`"),
        ("/asample", {"num_samples": 0}, "Expected `int` >= 1 - at `$.num_samples`"),
        ("/asample", {"topk_sample_logprobs": 65}, "Expected `int` <= 64 - at `$.topk_sample_logprobs`"),
        ("/optim_step", {"model_id": "m", "adam_params": {"beta1": 1.0}}, "Expected `float` < 1.0"),
        ("/optim_step", {"model_id": "m", "adam_params": {"eps": 0.0}}, "Expected `float` > 0.0"),
        ("/save_weights", {"model_id": "m", "ttl_seconds": 60}, "Expected `int` >= 3600 - at `$.ttl_seconds`"),
        ("/get_info", {}, "the body has model_id=None; give a text"),
    ],
)
def test_a_number_out_of_range_is_400(shared, path, given, told):
    client = Client(shared)
    if path == "/create_model":
        status, answer = client.create(**given)
    elif path == "/asample":
        status, answer = client.sample(**given)
    else:
        status, answer = client.post(path, given)
    assert (status, answer["type"]) == (400, "RequestError")
    assert told in answer["error"]


@pytest.mark.parametrize("loss", ["importance_sampling", "ppo", "cispo", "dro"])
def test_a_policy_loss_of_a_table_of_targets_is_400(shared, loss):
    request = message("ForwardBackwardRequest")(model_id="m", loss_fn=loss)
    datum = request.data.add()
    datum.model_input.add().encoded_text.tokens = np.arange(3, dtype="<i4").tobytes()
    for name, values in [
        ("target_tokens", np.ones((3, 2), "<i8")),
        ("logprobs", np.zeros((3, 2), "<f4")),
        ("advantages", np.ones((3, 2), "<f4")),
    ]:
        tensor = datum.loss_fn_inputs[name]
        tensor.dense, tensor.dtype = values.tobytes(), 2 if values.dtype.kind == "i" else 1
        tensor.shape.extend(values.shape)
    status, answer = Client(shared).post("/forward_backward", request.SerializeToString())
    assert (status, "(3, 2)" in answer["error"]) == (400, True)


def test_a_cancelled_operation_fails_in_its_turn(server):
    client = Client(server)
    created = client.create()
    model = client.ended(created)["model_id"]
    step = {"model_id": model, "adam_params": {"learning_rate": 1.0}}
    late = client.post("/optim_step", step | {"seq_id": 2})  # waits for number 1
    assert client.post("/cancel_future", {"request_id": late[1]["request_id"]})[0] == 204
    assert "result" not in client.ended(client.post("/optim_step", step | {"seq_id": 1}))
    assert client.ended(late) == {"error": "cancelled", "category": "user"}
    assert client.post("/cancel_future", {"request_id": late[1]["request_id"]})[0] == 204
    assert client.ended(created)["model_id"] == model


@pytest.mark.parametrize(
    ("path", "given"),
    [
        ("/optim_step", {"adam_params": {"learning_rate": -1.0}}),
        ("/optim_step", {"optimizer_params": {"type": "muon"}}),
        ("/save_weights", {"path": "a/b"}),
        ("/save_weights_for_sampler", {"kind": "inflight"}),
        ("/save_weights_external", {}),
        ("/load_weights", {"path": "x", "optimizer": True, "weights_access_token": "t"}),
        ("/forward", "no_such_loss"),
        ("/forward_backward", "ppo"),
    ],
)
def test_operations_after_a_rejected_one_run(shared, path, given):
    """The SDK numbers requests before it sends them; the server answers 400, and nothing has that number again."""
    client = Client(shared)
    model = client.ended(client.create())["model_id"]
    if isinstance(given, str):
        request = message("ForwardBackwardRequest").FromString(body(1.0, model))
        request.seq_id, request.loss_fn = 1, given
        rejected = request.SerializeToString()
    else:
        rejected = {"model_id": model, "seq_id": 1} | given
    assert client.post(path, rejected)[0] == 400
    assert client.ended(client.post("/optim_step", {"model_id": model, "seq_id": 2}))["metrics"]
    assert client.post(path, rejected)[0] == 400
    assert client.ended(client.post("/save_weights", {"model_id": model, "seq_id": 3, "path": "last"}))["path"]
    client.post(f"/sessions/{client.session}/finish", {})


def test_a_cancelled_sample_ends(server):
    client = Client(server)
    sampled = client.sample(prompt={"chunks": [{"tokens": [9]}]})
    assert Client(server, OTHER).post("/cancel_future", {"request_id": sampled[1]["request_id"]})[0] == 204
    assert client.post("/cancel_future", {"request_id": sampled[1]["request_id"]})[0] == 204
    assert client.ended(sampled) == {"error": "cancelled", "category": "user"}


def test_a_flood_of_one_tenant_is_429_and_others_go_on(server, gate):
    alice, bob = Client(server), Client(server, OTHER)
    slow = {"prompt": {"chunks": [{"tokens": [9]}]}}
    waiting = alice.sample(**slow, num_samples=3)
    assert waiting[0] == 200
    status, answer = alice.sample(num_samples=2)
    assert (status, "3 requests and sequences" in answer["error"]) == (429, True)
    assert alice.headers["Retry-After"] == "1"
    assert alice.sample()[0] == 200
    assert bob.ended(bob.sample(num_samples=8))
    model = bob.ended(bob.create())["model_id"]
    assert bob.ended(bob.passed(model, 1))
    gate.set()
    assert alice.ended(waiting)
    assert alice.sample(num_samples=2)[0] == 200


def test_bytes_that_wait_are_bounded(server):
    client = Client(server)
    model = client.ended(client.create())["model_id"]

    assert client.ended(client.passed(model, 1, 20))  # alone it may be larger than the quota
    status, answer = client.passed(model, 2, 20)
    assert (status, "whose gradient no optim_step has used" in answer["error"]) == (429, True)
    client.ended(client.post("/optim_step", {"model_id": model, "seq_id": 2, "adam_params": {}}))
    assert client.passed(model, 3, 20)[0] == 200


def test_a_body_that_is_too_large_is_413(tiny_model, tmp_path, monkeypatch):
    monkeypatch.setattr("rl_tinker.http.app.MAX_BODY_BYTES", 1000)
    with running(tmp_path / "s", tiny_model, model_name="tiny") as server:
        client = Client(server)
        assert client.post("/forward_backward", bytes(1001))[0] == 413
        assert client.ended(client.create())["model_id"]


def test_sessions_are_bounded(server):
    client = Client(server)
    assert [client.post("/create_session", {})[0] for _ in range(4)] == [200, 200, 200, 429]
    assert Client(server, OTHER).session


def test_sampling_sessions_are_bounded(server):
    client = Client(server)
    made = {"session_id": client.session, "base_model": "tiny"}

    def create(number, session=client.session):
        return client.post(
            "/create_sampling_session", made | {"session_id": session, "sampling_session_seq_id": number}
        )

    assert [create(number)[0] for number in (0, 1, 2, 0)] == [200] * 4  # the last is a retry
    status, answer = create(3)
    assert (status, "3 sampling sessions; its quota is 3" in answer["error"]) == (429, True)
    assert client.headers["Retry-After"] == "1"
    model = client.ended(client.create())["model_id"]
    save = {"model_id": model, "seq_id": 1, "sampling_session_seq_id": 4}
    assert client.post("/save_weights_for_sampler", save)[0] == 429
    other = client.post("/create_session", {})[1]["session_id"]
    assert create(0, other)[0] == 429
    assert client.post(f"/sessions/{client.session}/finish", {})[0] == 204
    assert create(0, other)[0] == 200


def test_results_of_samples_are_bounded(server):
    client = Client(server)
    sampled = []
    for _ in range(6):
        sampled.append(client.sample())
        assert client.ended(sampled[-1])
    found = [client.post("/retrieve_future", {"request_id": each[1]["request_id"]})[0] for each in sampled]
    assert found == [410, 200, 200, 200, 200, 200]


def test_a_name_saved_again_is_sampled_anew(server):
    client = Client(server)
    model = client.ended(client.create())["model_id"]
    save = {"model_id": model, "path": "same"}
    path = client.ended(client.post("/save_weights_for_sampler", save | {"seq_id": 1}))["path"]
    before = server.store.checkpoints[path].folder
    assert client.ended(client.post("/save_weights_for_sampler", save | {"seq_id": 2}))["path"] == path
    after = server.store.checkpoints[path].folder
    assert before != after
    until(lambda: [each.name for each in server.store.checkpoints_folder.iterdir()] == [after])
    assert client.ended(client.sample(base_model=None, model_path=path))


def test_all_weights_are_of_one_tenant(tiny_model, tmp_path):
    group, rank0 = FakeGroup(), {"rank": 0}
    with running(tmp_path / "s", tiny_model, group=group, model_name="tiny", training="full") as server:
        alice, bob = Client(server, lora=rank0), Client(server, OTHER, lora=rank0)
        model = alice.ended(alice.create())["model_id"]
        assert alice.post("/get_info", {"model_id": model})[1]["is_lora"] is False
        assert alice.ended(alice.create(1, lora_config=None))
        assert alice.create(2, lora_config={"rank": 4})[0] == 400
        assert bob.create()[0] == 429
        assert alice.post(f"/sessions/{alice.session}/finish", {})[0] == 204
        until(lambda: bob.create()[0] == 200)
        assert bob.ended(bob.create())["model_id"]
