"""Images on the servers of others: what the embedded server draws of the same images, they draw too."""

import asyncio
import base64
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from pictures import png
from rollout_servers import (
    SGLANG,
    VLLM,
    fake_sglang_config,
    fake_vllm_config,
    real_sglang,
    real_sglang_config,
    real_vl_model,
    real_vllm,
    real_vllm_config,
    serve,
)

from rl_rollout import (
    ConfigError,
    GenerateRequest,
    GenerationError,
    RequestError,
    ServerConfig,
    UnsupportedError,
    create_server,
)
from rl_rollout.backends.sglang import check_prompt_length, one_place_each
from rl_rollout.backends.vllm import features_of
from rl_rollout.multimodal import ImagePreparer
from rl_rollout.testing import FakeReceiver, load_weights, write_tiny_vl_model

START, IMAGE, VIDEO, END = 52, 53, 54, 55
PLACE = (START, IMAGE, END)
MARKS = {"image_token_id": IMAGE, "video_token_id": VIDEO}


def has_torchvision(environment):
    return bool(environment) and any(Path(environment).glob("lib/python3*/site-packages/torchvision"))


class ServesImages:
    """What a server of a vision-language model must do. Sides of images are multiples of those of a feature."""

    side = 8
    takes_sampled_placeholders = True

    @pytest.fixture(scope="class")
    @classmethod
    def images(cls):
        return [png(cls.side * width, cls.side * height, seed) for seed, (width, height) in enumerate(((3, 1), (1, 4)))]

    @pytest.fixture(scope="class")
    @classmethod
    def oracle(cls, served):
        """The embedded server of the same folder."""
        server = create_server("embedded", ServerConfig(model_path=served.model_path, num_threads=1))
        served.run(server.start())
        yield server
        served.run(server.stop())

    def compare(self, served, oracle, request, count=1):
        want = served.run(oracle.generate(request))
        for found in served.generate_all(
            [replace(request, request_id=f"{request.request_id}.{i}") for i in range(count)]
        ):
            assert found.token_ids == want.token_ids
            assert found.logprobs == pytest.approx(want.logprobs, abs=1e-4)
        return want.token_ids

    def test_greedy_and_its_logprobs_equal_the_embedded_server_s(self, served, oracle, images):
        wide, tall = images
        assert served.server.capabilities.takes_images
        asked = served.request((5, 6, *PLACE, 7, 8), max_new_tokens=24)
        alike = [
            self.compare(served, oracle, replace(asked, request_id=f"{asked.request_id}{name}", images=(image,)), 2)
            for name, image in (("wide", wide), ("tall", tall))
        ]
        assert alike[0] != alike[1]  # the same ids, and other images
        two = served.request((5, *PLACE, 9, *PLACE, 10, 11), max_new_tokens=24)
        self.compare(served, oracle, replace(two, images=(tall, wide)))
        self.compare(served, oracle, served.request((12, 13, 14), max_new_tokens=24))

    def test_it_does_not_matter_who_writes_the_places_out(self, served, oracle, images):
        asked = served.request((5, START, *(IMAGE,) * 3, END, 7), max_new_tokens=24)
        self.compare(served, oracle, replace(asked, images=tuple(images[:1])))

    def test_a_placeholder_that_was_sampled_stands_for_no_image(self, served, oracle, images):
        wide, tall = images
        asked = served.request((5, *PLACE, 9, IMAGE, VIDEO, 8, *PLACE, 10), max_new_tokens=24)
        asked = replace(asked, images=(tall, wide), sampled_spans=((4, 8),))
        if self.takes_sampled_placeholders:
            self.compare(served, oracle, asked)
            return
        with pytest.raises(UnsupportedError, match="a model sampled the placeholder at token 8"):
            served.run(served.server.generate(asked))

    def test_new_weights_see_images_anew(self, served, oracle, images):
        """Known images too, and those of what is in flight."""
        weights = load_weights(served.model_path)
        other = {name: tensor.roll(1, dims=0) if "visual" in name else tensor for name, tensor in weights.items()}
        asked = replace(served.request((5, 6, *PLACE, 7, 8), max_new_tokens=24), images=(images[0],))
        before = self.compare(served, oracle, asked)
        going, num_old = self.updated_in_flight(served, asked, [other, weights])
        install(oracle, served, other)
        rest = replace(
            asked,
            prompt_token_ids=asked.prompt_token_ids + going.token_ids[:num_old],
            sampled_spans=((len(asked.prompt_token_ids), len(asked.prompt_token_ids) + num_old),),
        )
        want = served.run(oracle.generate(rest))
        assert going.token_ids[num_old : num_old + 24] == want.token_ids[: 200 - num_old]
        assert self.compare(served, oracle, replace(asked, request_id="after")) != before
        served.install(weights)
        install(oracle, served, weights)
        assert self.compare(served, oracle, replace(asked, request_id="again")) == before

    @staticmethod
    def updated_in_flight(served, asked, weights):
        """A request of 200 tokens under whose hands the weights changed from `weights[1]` to `weights[0]`."""

        async def attempt(number):
            request = sampled(asked, f"going{number}", 200)
            task = asyncio.create_task(served.server.generate(request))
            await served.server.generate(sampled(asked, f"beside{number}", 1))
            await served.server.pause("keep")
            await served.update(served, weights[0], served.version + 1)
            await served.server.resume()
            return await task

        for number in range(5):
            old = served.version
            going = served.run(attempt(number))
            served.version += 1
            num_old = going.weight_versions.count(old)
            if num_old < 200:
                assert going.weight_versions == (old,) * num_old + (served.version,) * (200 - num_old)
                return going, num_old
            served.install(weights[1])
        raise AssertionError("each of 5 requests had ended before the update")

    def test_what_cannot_be_shown_is_refused_and_the_server_goes_on(self, served, oracle, images):
        good = replace(served.request((5, 6, *PLACE, 7, 8)), images=(images[0],))
        for bad, told in (
            (replace(good, images=()), "the prompt has places for images .token 53. and the request none"),
            (replace(good, images=tuple(images)), "2 images and 1 places for them"),
            (replace(good, images=("data:image/png;base64,AAAA",)), "image 0 cannot be read"),
            (replace(good, prompt_token_ids=(5,) * 248 + good.prompt_token_ids), "maximum context length is"),
            (replace(good, returns_prompt_logprobs=True), "returns_prompt_logprobs"),
        ):
            with pytest.raises(RequestError, match=told):
                served.run(served.server.generate(bad))
        self.compare(served, oracle, good)


def sampled(request, name, count):
    params = replace(request.sampling_params, max_new_tokens=count)
    return replace(request, request_id=name, sampling_params=params)


def install(oracle, served, weights):
    served.run(oracle.update_weights(FakeReceiver(weights, served.version), served.version))


@pytest.mark.slow
class TestProtocolOfVllm(ServesImages):
    @pytest.fixture(scope="class")
    @classmethod
    def served(cls, tmp_path_factory, new_trainer):
        folder = write_tiny_vl_model(tmp_path_factory.mktemp("vl") / "model")
        yield from serve("vllm", fake_vllm_config(folder), new_trainer(60), max_model_len=256)


@real_vllm
@pytest.mark.skipif(bool(VLLM) and not has_torchvision(VLLM), reason="RL_ROLLOUT_VLLM has no torchvision")
class TestRealVllm(ServesImages):
    @pytest.fixture(scope="class", params=["qwen2_5_vl", "qwen3_vl"])
    @classmethod
    def served(cls, request, tmp_path_factory, new_trainer):
        folder = real_vl_model(tmp_path_factory.mktemp("vl"), request.param)
        yield from serve("vllm", real_vllm_config(folder, max_model_len=256), new_trainer(60), max_model_len=256)


@real_sglang
@pytest.mark.skipif(bool(SGLANG) and not has_torchvision(SGLANG), reason="RL_ROLLOUT_SGLANG has no torchvision")
class TestRealSglang(ServesImages):
    side = 28
    takes_sampled_placeholders = False

    @pytest.fixture(scope="class", params=["qwen2_5_vl", "qwen3_vl"])
    @classmethod
    def served(cls, request, tmp_path_factory, new_trainer):
        folder = real_vl_model(tmp_path_factory.mktemp("vl"), request.param, patch_size=14)
        config = real_sglang_config(folder, max_model_len=256, max_total_tokens=4096)
        yield from serve("sglang", config, new_trainer(60), max_model_len=254)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tiny_vl_model(tmp_path_factory.mktemp("vl") / "model")


class Processor:
    """Two patches of four numbers make a feature; every image has as many features as it is pixels wide."""

    token_id, video_token_id, audio_token_id = IMAGE, None, None

    def placeholder(self, url):
        return IMAGE

    def runs(self, urls, runs):
        return {IMAGE: runs}

    def __init__(self):
        self.num_read = 0

    def read(self, image):
        count = 8 * image.width
        self.num_read += count
        values = torch.arange(self.num_read - count, self.num_read, dtype=torch.float32).reshape(-1, 4)
        grid = torch.tensor([[1, 2, image.width]])
        return (IMAGE,) * image.width, {"pixel_values": values, "image_grid_thw": grid}

    def join(self, images):
        return {name: torch.cat([image[name] for image in images]) for name in images[0]}


def prepared(ids, images, **fields):
    asked = GenerateRequest(request_id="r", prompt_token_ids=ids, images=images, **fields)
    return ImagePreparer(Processor()).prepare(asked)


def test_features_are_what_vllm_reads():
    from msgspec import msgpack

    request, images = prepared((5, IMAGE, 6, IMAGE, 9, IMAGE, 7), (png(2, 1, 0), png(1, 1, 1)), sampled_spans=((3, 4),))
    assert request.prompt_token_ids == (5, IMAGE, IMAGE, 6, IMAGE, 9, IMAGE, 7)
    features = features_of(images)
    places = [{"offset": 1, "length": 2}, {"offset": 6, "length": 1}]
    assert features["mm_placeholders"] == {"image": places}
    assert len(set(features["mm_hashes"]["image"])) == 2
    first, second = (msgpack.decode(base64.b64decode(item)) for item in features["kwargs_data"]["image"])
    kind, shape, data = second["pixel_values"]["data"]
    assert (kind, shape, data.code) == ("float32", [2, 4], 3)
    assert torch.frombuffer(bytearray(data.data), dtype=torch.float32).tolist() == [*range(16, 24)]
    assert first["pixel_values"]["field"] == ["flat", {"keep_on_cpu": False, "slices": [[0, 4, None]], "dim": 0}]
    kind, shape, data = first["image_grid_thw"]["data"]
    assert (kind, shape, bytes(data.data)) == ("int64", [3], torch.tensor([1, 2, 2]).numpy().tobytes())


def test_places_that_are_torn_apart_are_refused():
    with pytest.raises(RequestError, match="the 2 tokens of image 0 are not one after the other from token 0 on"):
        prepared((IMAGE, 5, IMAGE, 6), (png(2, 1, 0),))


def test_sglang_is_given_one_place_for_each():
    request, images = prepared((5, IMAGE, 6, IMAGE, 7), (png(2, 1, 0), png(3, 1, 1)))
    assert request.prompt_token_ids == (5, IMAGE, IMAGE, 6, IMAGE, IMAGE, IMAGE, 7)
    assert one_place_each(request, images, MARKS) == [5, IMAGE, 6, IMAGE, 7]
    request, images = prepared((5, IMAGE, 6, VIDEO, 7), (png(2, 1, 0),))
    with pytest.raises(UnsupportedError, match="sampled the placeholder at token 4 of the prompt"):
        one_place_each(request, images, MARKS)
    with pytest.raises(GenerationError, match="made 5 tokens of a prompt that has 6"):
        check_prompt_length(request, {"meta_info": {"prompt_tokens": 5}})


def test_what_would_show_other_images_is_refused(folder):
    with pytest.raises(ConfigError, match="images are normalised before"):
        create_server("vllm", fake_vllm_config(folder, "--mm-device-do-normalize"))
    with pytest.raises(ConfigError, match="SGLANG_VLM_CACHE_SIZE_MB='100': .* leave it out"):
        create_server("sglang", fake_sglang_config(folder, env={"SGLANG_VLM_CACHE_SIZE_MB": 100}))
    server = create_server("sglang", fake_sglang_config(folder))  # whose patches are no 1,176 numbers
    assert not server.capabilities.takes_images
    assert server.process.environment["SGLANG_VLM_CACHE_SIZE_MB"] == "0"
