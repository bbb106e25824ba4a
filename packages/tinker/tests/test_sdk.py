"""The published SDK, unmodified, against the server over fake training processes and replicas."""

import math

import numpy as np
import pytest
import tinker
from packages.tinker.tests.support import KEY, FakeGroup, FakeReplicas, running
from tinker import types

pytestmark = [
    pytest.mark.process,
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.usefixtures("collects_clients"),
]


@pytest.fixture(scope="module")
def group():
    return FakeGroup()


@pytest.fixture(scope="module")
def replicas():
    return FakeReplicas()


@pytest.fixture(scope="module")
def server(tiny_model, tmp_path_factory, group, replicas):
    folder = tmp_path_factory.mktemp("server")
    with running(folder, tiny_model, group=group, replicas=replicas, model_name="tiny") as server:
        yield server


@pytest.fixture(scope="module")
def service(server):
    with tinker.ServiceClient(base_url=server.url, api_key=KEY) as service:
        yield service


@pytest.fixture
def rest(server):
    return tinker.RestClient(base_url=server.url, api_key=KEY)


def datum(tokens=(5, 6, 7, 8), weight=1.0):
    return types.Datum(
        model_input=types.ModelInput.from_ints(list(tokens[:-1])),
        loss_fn_inputs={
            "target_tokens": np.array(tokens[1:], np.int64),
            "weights": np.full(len(tokens) - 1, weight, np.float32),
        },
    )


def model_of(service, **options):
    return service.create_lora_training_client(base_model="tiny", rank=4, seed=3, **options).result()


@pytest.mark.promise("The published tinker SDK works unchanged")
def test_a_step_through_the_sdk_changes_the_model(service, group):
    client = model_of(service)
    passed = client.forward_backward([datum()] * 3, "cross_entropy")
    stepped = client.optim_step(types.AdamParams(learning_rate=0.5))
    output = passed.result()
    assert output.metrics["loss:sum"] == 9.0
    assert [each["logprobs"].data for each in output.loss_fn_outputs] == [[-3.0] * 3] * 3
    assert stepped.result().metrics["grad_norm"] == 9.0
    assert client.forward([datum()], "cross_entropy").result().loss_fn_outputs[0]["logprobs"].data == [-7.5] * 3
    info = client.get_info()
    assert (info.model_id, info.lora_rank, info.is_lora) == (client.model_id, 4, True)
    assert group.values[client.model_id] == 7.5


@pytest.mark.promise("Requests of one model run in order however many are pipelined")
def test_pipelined_requests_run_in_order(service, group):
    client = model_of(service)
    group.calls.clear()
    futures = []
    for _ in range(3):
        futures.append(client.forward_backward([datum()], "cross_entropy"))
        futures.append(client.optim_step(types.AdamParams(learning_rate=1.0)))
    for future in futures:
        future.result()
    assert [name for name, _ in group.calls] == ["backward", "optim_step"] * 3


def test_a_custom_loss_goes_through_logprobs(service):
    client = model_of(service)

    def loss(data, logprobs):
        return -2.0 * sum(each.sum() for each in logprobs), {"mine": 1.0}

    output = client.forward_backward_custom([datum()], loss).result()
    assert output.metrics["loss:sum"] == 18.0
    assert output.metrics["mine"] == 1.0
    client.optim_step(types.AdamParams(learning_rate=0.5)).result()
    assert client.forward([datum()], "cross_entropy").result().loss_fn_outputs[0]["logprobs"].data == [-6.0] * 3


def test_large_batches_arrive_in_chunks(service):
    client = model_of(service)
    output = client.forward_backward([datum()] * 2500, "cross_entropy").result()
    assert len(output.loss_fn_outputs) == 2500
    assert output.metrics["loss:sum"] == 7500.0


def test_targets_may_be_a_table(service):
    client = model_of(service)
    table = types.Datum(
        model_input=types.ModelInput.from_ints([5, 6]),
        loss_fn_inputs={
            "target_tokens": np.array([[1, 2, 3], [4, 5, 6]]),
            "weights": np.ones((2, 3), np.float32),
        },
    )
    outputs = client.forward([table, datum()], "cross_entropy").result().loss_fn_outputs
    assert [tuple(each["logprobs"].shape) for each in outputs] == [(2, 3), (3,)]


def test_state_is_saved_and_loaded(service, rest):
    client = model_of(service)
    client.forward_backward([datum()], "cross_entropy")
    client.optim_step(types.AdamParams(learning_rate=1.0)).result()
    path = client.save_state("first").result().path
    assert path == f"tinker://{client.model_id}/weights/first"
    client.forward_backward([datum()], "cross_entropy")
    client.optim_step(types.AdamParams(learning_rate=1.0)).result()
    again = service.create_training_client_from_state_with_optimizer(path).result()
    assert again.forward([datum()], "cross_entropy").result().loss_fn_outputs[0]["logprobs"].data == [-6.0] * 3
    assert again.get_info().lora_rank == 4
    assert rest.get_weights_info_by_tinker_path(path).result().lora_rank == 4


def test_a_name_is_saved_once_unless_overwritten(service):
    client = model_of(service)
    client.save_state("same").result()
    with pytest.raises(tinker.RequestFailedError, match="exists"):
        client.save_state("same").result()
    client.save_state("same", overwrite=True).result()


def test_samples_come_from_saved_weights(service, replicas):
    client = model_of(service)
    sampler = client.save_weights_and_get_sampling_client().result()
    replicas.requests.clear()
    params = types.SamplingParams(max_tokens=4, seed=7, temperature=0.5, top_k=3)
    response = sampler.sample(types.ModelInput.from_ints([5, 6]), num_samples=2, sampling_params=params).result()
    assert [list(each.tokens) for each in response.sequences] == [[6] * 4] * 2
    assert response.sequences[0].logprobs == pytest.approx([-0.5] * 4)
    assert {each.sequence_id for each in response.sequences} != {None}
    assert response.sequences[0].stop_reason == "length"
    assert [each.sampling_params.seed for each in replicas.requests] == [7, 8]
    assert replicas.requests[0].adapter.startswith(f"tinker://{client.model_id}/sampler_weights/")


def test_samples_of_the_base_model_with_numbers(service):
    sampler = service.create_sampling_client(base_model="tiny").result()
    response = sampler.sample(
        types.ModelInput.from_ints([5, 6, 7]),
        num_samples=1,
        sampling_params=types.SamplingParams(max_tokens=1),
        include_prompt_logprobs=True,
        topk_prompt_logprobs=2,
        topk_sample_logprobs=1,
    ).result()
    assert response.prompt_logprobs == [None, -0.25, -0.25]
    assert response.topk_prompt_logprobs == [None, [(5, -0.5), (6, -1.5)], [(6, -0.5), (7, -1.5)]]
    assert response.sequences[0].topk_logprobs == [[(7, -0.5)]]
    assert sampler.compute_logprobs(types.ModelInput.from_ints([5, 6, 7])).result() == [None, -0.25, -0.25]


def test_a_named_sampler_checkpoint_is_sampled(service):
    client = model_of(service)
    path = client.save_weights_for_sampler("s1").result().path
    sampler = service.create_sampling_client(model_path=path).result()
    params = types.SamplingParams(max_tokens=2)
    assert sampler.sample(types.ModelInput.from_ints([5]), 1, params).result().sequences[0].tokens == [5, 5]
    assert sampler.get_base_model() == "tiny"


def test_checkpoints_are_listed_published_and_deleted(service, rest):
    client = model_of(service)
    path = client.save_state("kept", ttl_seconds=7200, user_metadata={"a": "b"}).result().path
    client.save_weights_for_sampler("sampled").result()
    run = rest.get_training_run(client.model_id).result()
    assert run.last_checkpoint.tinker_path == path
    assert run.last_sampler_checkpoint.checkpoint_id == "sampler_weights/sampled"
    assert client.model_id in {each.training_run_id for each in rest.list_training_runs().result().training_runs}
    (first, second) = rest.list_checkpoints(client.model_id).result().checkpoints
    assert (first.checkpoint_id, first.user_metadata, first.public) == ("weights/kept", {"a": "b"}, False)
    assert first.expires_at is not None
    assert second.size_bytes < first.size_bytes
    rest.set_checkpoint_ttl_from_tinker_path(path, None).result()
    rest.publish_checkpoint_from_tinker_path(path).result()
    (first, _) = rest.list_checkpoints(client.model_id).result().checkpoints
    assert (first.public, first.expires_at) == (True, None)
    rest.unpublish_checkpoint_from_tinker_path(path).result()
    rest.delete_checkpoint_from_tinker_path(path).result()
    assert len(rest.list_checkpoints(client.model_id).result().checkpoints) == 1
    assert path not in {each.tinker_path for each in rest.list_user_checkpoints().result().checkpoints}


def test_weights_are_exported_for_download(service, rest):
    import httpx

    client = model_of(service)
    path = client.save_weights_external("out").result().path
    urls = rest.get_external_weights_urls(path).result().urls
    assert list(urls) == ["adapter.json"]
    assert httpx.get(urls["adapter.json"]).json() == 3.0
    assert httpx.get(urls["adapter.json"] + "0").status_code == 404


def test_sessions_and_capabilities(service, rest):
    (model,) = rest.get_server_capabilities().result().supported_models
    assert (model.model_name, model.max_context_length, model.trainable) == ("tiny", 256, True)
    session = service.holder.get_session_id()
    assert session in rest.list_sessions().result().sessions
    client = model_of(service)
    assert client.model_id in rest.get_session(session).result().training_run_ids


def test_errors_are_sentences_for_the_user(service):
    client = model_of(service)
    with pytest.raises(tinker.BadRequestError, match="vocabulary"):
        client.forward_backward([datum((5, 6, 100000))], "cross_entropy").result()
    with pytest.raises(tinker.NotFoundError, match="this server has 'tiny'"):
        service.create_lora_training_client(base_model="other").result()


@pytest.mark.promise("A NaN fails the requests that caused it alone")
def test_a_gradient_that_is_not_finite_fails_its_step_alone(service):
    client = model_of(service)
    client.forward_backward([datum(weight=3e38)] * 4, "cross_entropy").result()
    with pytest.raises(tinker.RequestFailedError, match="not finite"):
        client.optim_step(types.AdamParams(learning_rate=1e300)).result()
    client.forward_backward([datum()], "cross_entropy")
    assert client.optim_step(types.AdamParams(learning_rate=1.0)).result().metrics["grad_norm"] == 3.0
    assert math.isfinite(client.forward([datum()], "cross_entropy").result().metrics["loss:sum"])


def test_an_ended_session_frees_its_models(server, group):
    with tinker.ServiceClient(base_url=server.url, api_key="tml-other") as service:
        client = model_of(service)
        client.forward([datum()], "cross_entropy").result()
    with tinker.ServiceClient(base_url=server.url, api_key="tml-other") as service:
        model_of(service)
    assert client.model_id not in group.values
