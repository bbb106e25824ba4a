import asyncio
import threading
from dataclasses import replace

import pytest
import torch
from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL

from rl_omni.pipeline import PipelineModel, load_pipeline
from rl_omni.testing import write_tiny_pipeline
from rl_rollout.errors import ConfigError, ModelFolderError, RequestError, ServerLostError, WeightUpdateError
from rl_rollout.registry import create_server, launch_server
from rl_rollout.types import FinishReason, GenerateRequest, SamplingParams, ServerConfig

STEPS = 3


def request(name="a", prompt=(1,), **params):
    return GenerateRequest(request_id=name, prompt_token_ids=prompt, sampling_params=SamplingParams(**params))


def config_of(folder, **options):
    return ServerConfig(model_path=folder, options={"num_steps": STEPS} | options)


async def served(folder, use, **options):
    server = create_server("diffusion", config_of(folder, **options))
    await server.start()
    try:
        return await use(server)
    finally:
        await server.stop()


class Weights:
    """Receiver of given tensors."""

    address, version = "inproc:", None

    def __init__(self, tensors):
        self.tensors = tensors

    async def receive_weights(self):
        for each in self.tensors:
            yield each


def test_a_picture_has_a_log_prob_for_every_step(pipeline):
    output = asyncio.run(served(pipeline, lambda server: server.generate(request(seed=1))))
    assert output.finish_reason == FinishReason.STOP
    assert output.token_ids == ()
    assert (len(output.logprobs), output.weight_versions) == (STEPS, (0,) * STEPS)
    assert output.columns["latents"].shape == (STEPS + 1, 3, 8, 8)
    assert output.columns["timesteps"].tolist() == pytest.approx([1, 2 / 3, 1 / 3, 0])
    assert output.columns["picture"].shape == (3, 8, 8)
    assert 0 <= output.columns["picture"].min() <= output.columns["picture"].max() <= 1
    assert torch.equal(output.columns["picture"], ((output.columns["latents"][-1] + 1) / 2).clamp(0, 1))


@pytest.mark.process
def test_a_seed_decides_a_picture_whatever_its_batch(pipeline):
    async def both(server):
        alone = await server.generate(request(seed=7))
        return alone, await asyncio.gather(*(server.generate(request(str(i), seed=i)) for i in range(5, 9)))

    alone, together = asyncio.run(served(pipeline, both))
    torch.testing.assert_close(alone.columns["picture"], together[2].columns["picture"])
    assert not torch.allclose(together[0].columns["picture"], together[1].columns["picture"])


def test_an_aborted_picture_keeps_its_steps(pipeline):
    async def aborted(server):
        await server.pause("keep")
        running = asyncio.create_task(server.generate(request()))
        while not running.done():
            await server.abort(["a"])
            await asyncio.wait([running], timeout=0.01)
        return await running

    output = asyncio.run(served(pipeline, aborted))
    assert (output.finish_reason, output.logprobs) == (FinishReason.ABORT, ())
    assert "picture" not in output.columns


def test_new_weights_serve_at_once_with_their_version(pipeline):
    weights = load_pipeline(pipeline).transformer.state_dict()

    async def updated(server):
        before = await server.generate(request(seed=1))
        await server.update_weights(Weights((n, w * 1.5) for n, w in weights.items()), 4)
        return before, await server.generate(request(seed=1))

    before, after = asyncio.run(served(pipeline, updated))
    assert after.weight_versions == (4,) * STEPS
    assert not torch.allclose(before.columns["picture"], after.columns["picture"])


@pytest.mark.process
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: list(w.items())[1:], "lacks 1 tensors"),
        (lambda w: [*w.items(), ("more", torch.ones(1))], "no such tensor"),
        (lambda w: [(n, t.flatten()[:1] if i == 0 else t) for i, (n, t) in enumerate(w.items())], "does not fit"),
    ],
)
def test_wrong_weights_leave_the_old_version_serving(pipeline, change, message):
    weights = load_pipeline(pipeline).transformer.state_dict()

    async def updated(server):
        before = await server.generate(request(seed=1))
        with pytest.raises(WeightUpdateError, match=f"{message}.*version 0 still serves"):
            await server.update_weights(Weights(change(weights)), 1)
        return before, await server.generate(request(seed=1))

    before, after = asyncio.run(served(pipeline, updated))
    assert torch.equal(before.columns["picture"], after.columns["picture"])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (request(temperature=0.5), "`seed` alone"),
        (request(prompt=()), "takes 1 to 4 ids from 0 to 15"),
        (request(prompt=(16,)), "takes 1 to 4 ids from 0 to 15"),
    ],
)
def test_a_wrong_request_is_refused(pipeline, given, message):
    async def refused(server):
        with pytest.raises(RequestError, match=message):
            await server.generate(given)

    asyncio.run(served(pipeline, refused))


@pytest.mark.parametrize("options", [{"num_steps": 0}, {"noise": -1}, {"sde": "ddpm"}, {"size": 7}, {"steps": 4}])
def test_a_wrong_option_is_refused(pipeline, options):
    with pytest.raises(ConfigError, match=next(iter(options))):
        create_server("diffusion", config_of(pipeline, **options))


def test_what_cannot_be_served_is_refused(pipeline, tmp_path):
    with pytest.raises(ModelFolderError, match=r"model_index\.json cannot be read"):
        create_server("diffusion", config_of(str(tmp_path)))
    with pytest.raises(ConfigError, match="serves in float32"):
        create_server("diffusion", replace(config_of(pipeline), dtype="bfloat16"))


@pytest.mark.process
def test_a_launched_server_paints_the_same_pictures(pipeline):
    """In a process of its own, over HTTP: every column to the bit."""

    async def painted():
        server = launch_server("diffusion", config_of(pipeline))
        await server.start()
        try:
            return await server.generate(request(seed=3))
        finally:
            await server.stop()

    here, there = asyncio.run(served(pipeline, lambda server: server.generate(request(seed=3)))), asyncio.run(painted())
    assert there == here
    assert there.columns.keys() == here.columns.keys() == {"latents", "timesteps", "step_stds", "picture"}
    assert all(torch.equal(there.columns[name], tensor) for name, tensor in here.columns.items())


def test_stopping_ends_requests_in_flight(pipeline):
    async def stopped():
        server = create_server("diffusion", config_of(pipeline))
        await server.start()
        await server.pause("keep")
        running = asyncio.create_task(server.generate(request()))
        await asyncio.wait([running], timeout=0.01)
        await server.stop()
        with pytest.raises(ServerLostError, match="stopped"):
            await running

    asyncio.run(stopped())


@pytest.mark.process
def test_a_vae_decodes_the_last_latents(tmp_path):
    vae = AutoencoderKL(
        latent_channels=3, block_out_channels=(8,), norm_num_groups=4, scaling_factor=0.5, shift_factor=0.1
    ).eval()
    vae.save_pretrained(write_tiny_pipeline(tmp_path) / "vae")
    output = asyncio.run(served(str(tmp_path), lambda server: server.generate(request(seed=1))))
    with torch.no_grad():
        decoded = vae.decode(output.columns["latents"][-1:] / 0.5 + 0.1).sample[0]
    torch.testing.assert_close(output.columns["picture"], ((decoded + 1) / 2).clamp(0, 1))


def test_a_failing_step_of_a_cancelled_request_ends_no_server(pipeline, monkeypatch):
    entered, left = threading.Event(), threading.Event()

    async def use(server):
        def failing(*_):
            entered.set()
            left.wait(30)
            raise RuntimeError("on purpose")

        with monkeypatch.context() as patch:
            patch.setattr(PipelineModel, "velocity", failing)
            task = asyncio.create_task(server.generate(request("left")))
            await asyncio.to_thread(entered.wait, 30)
            task.cancel()
            await asyncio.wait([task])
            left.set()
            await server.pause("abort")
        await server.resume()
        return await asyncio.wait_for(server.generate(request("next")), 30)

    assert asyncio.run(served(pipeline, use)).finish_reason == FinishReason.STOP
