"""What every rollout server must do, as tests. Public through `rl_rollout.testing.fake`."""

from __future__ import annotations

import asyncio
import json
import math
import urllib.request
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from rl_rollout.errors import RequestError, ServerLostError, UnsupportedError
from rl_rollout.testing.conformance_control import ControlConformance
from rl_rollout.testing.served import VOCAB_SIZE, expect, same_tokens
from rl_rollout.types import FinishReason

if TYPE_CHECKING:
    from rl_rollout.testing.served import Served
    from rl_rollout.types import GenerateRequest, TokenChunk


class GenerationConformance:
    """What is generated, beside which neighbours, and what is refused."""

    def test_start_again_tells_the_same_address(self, served: Served) -> None:
        address = served.run(served.server.start())
        assert served.run(served.server.start()) == address
        assert address.model
        assert address.pid > 0

    def test_every_token_has_a_logprob_and_a_version(self, served: Served) -> None:
        request = served.request(max_new_tokens=11, temperature=1.0)
        output = served.run(served.server.generate(request))
        assert output.request_id == request.request_id
        assert output.finish_reason is FinishReason.LENGTH
        assert len(output.token_ids) == len(output.logprobs) == 11
        assert all(x <= 0 for x in output.logprobs)
        assert output.weight_versions == (served.version,) * 11

    def test_greedy_is_repeatable_beside_any_neighbours(self, served: Served) -> None:
        alone = served.generate(max_new_tokens=20)
        requests = [served.request((5, 6, 7), max_new_tokens=20)]
        requests += [served.request(tuple(range(3, 5 + i)), max_new_tokens=3 + i, temperature=1.0) for i in range(20)]
        assert same_tokens(served.generate_all(requests)[0], alone)

    def test_a_seed_fixes_the_tokens_beside_any_neighbours(self, served: Served) -> None:
        if not served.server.capabilities.is_seeded:
            expect(UnsupportedError, lambda: served.generate(seed=1), "seed")
            return
        alone = [served.generate(max_new_tokens=20, temperature=1.0, seed=seed) for seed in (1, 2)]
        assert alone[0].token_ids != alone[1].token_ids
        requests = [served.request(max_new_tokens=20, temperature=1.0, seed=seed) for seed in (1, 2)]
        requests += [served.request((9,) * (i + 1), temperature=1.0) for i in range(10)]
        assert all(map(same_tokens, alone, served.generate_all(requests)[:2]))

    def test_a_group_without_seeds_differs(self, served: Served) -> None:
        outputs = served.generate_all([served.request(max_new_tokens=20, temperature=1.0) for _ in range(8)])
        assert len({output.token_ids for output in outputs}) == 8

    def test_a_stop_token_ends_the_output_and_is_its_last_token(self, served: Served) -> None:
        ids = served.generate(max_new_tokens=12).token_ids
        stop = ids[6]
        try:
            output = served.generate(max_new_tokens=12, stop_token_ids=(stop,))
        except UnsupportedError:  # of both together
            output = served.generate(max_new_tokens=12, stop_token_ids=(stop,), ignore_eos=False)
        assert output.token_ids == ids[: ids.index(stop) + 1]
        assert output.finish_reason is FinishReason.STOP

    def test_the_context_ends_a_request(self, served: Served) -> None:
        prompt = (5,) * (served.max_model_len - 10)
        output = served.generate(prompt, max_new_tokens=50)
        assert len(output.token_ids) == 10
        assert output.finish_reason is FinishReason.LENGTH

    def test_logprobs_are_of_the_distribution_that_was_sampled_from(self, served: Served) -> None:
        """Temperature, top-k and top-p, recomputed by transformers."""
        import torch
        from transformers import AutoModelForCausalLM

        model: Any = AutoModelForCausalLM.from_pretrained(served.model_path, trust_remote_code=False).eval()
        prompt = (5, 6, 7)
        for top_k, top_p in ((0, 1.0), (20, 1.0), (0, 0.9), (20, 0.9)):
            try:
                output = served.generate(prompt, temperature=0.7, top_k=top_k, top_p=top_p, max_new_tokens=60)
            except UnsupportedError:
                continue
            with torch.inference_mode():
                logits = model(torch.tensor([[*prompt, *output.token_ids]])).logits[0, len(prompt) - 1 : -1]
            ordered, order = (logits / 0.7).sort(dim=-1, descending=True)
            if top_k:
                ordered[:, top_k:] = -math.inf
            if top_p < 1:
                probs = ordered.softmax(-1)
                ordered[probs.cumsum(-1) - probs >= top_p] = -math.inf
            place = order.argsort(-1).gather(-1, torch.tensor(output.token_ids)[:, None])
            wanted = ordered.log_softmax(-1).gather(-1, place)[:, 0]
            torch.testing.assert_close(torch.tensor(output.logprobs), wanted, atol=1e-4, rtol=0)

    def test_top_and_prompt_logprobs_are_those_of_the_drawn_tokens(self, served: Served) -> None:
        prompt = (5, 6, 7, 8)
        plain = served.request(prompt, temperature=0.7, seed=None)
        if not served.server.capabilities.gives_top_logprobs:
            expect(UnsupportedError, lambda: served.run(served.server.generate(replace(plain, num_top_logprobs=2))))
        else:
            output = served.run(served.server.generate(replace(plain, num_top_logprobs=VOCAB_SIZE)))
            for token, logprob, top in zip(output.token_ids, output.logprobs, output.top_logprobs, strict=True):
                assert len(top) == VOCAB_SIZE
                assert [x for _, x in top] == sorted((x for _, x in top), reverse=True)
                assert abs(dict(top)[token] - logprob) < 1e-4
                assert abs(sum(math.exp(x) for _, x in top) - 1) < 1e-3  # all of the tiny vocabulary
        scoring = replace(served.request(prompt, max_new_tokens=1), returns_prompt_logprobs=True)
        if not served.server.capabilities.gives_prompt_logprobs:
            expect(UnsupportedError, lambda: served.run(served.server.generate(scoring)))
            return
        scores = served.run(served.server.generate(scoring)).prompt_logprobs
        # The last token of the prompt, had it been drawn.
        drawn = served.generate((5, 6), max_new_tokens=2, temperature=1.0)
        redrawn = replace(served.request((5, 6, *drawn.token_ids), max_new_tokens=1), returns_prompt_logprobs=True)
        found = served.run(served.server.generate(redrawn)).prompt_logprobs
        assert len(scores) == 3
        assert all(abs(a - b) < 1e-4 for a, b in zip(found[1:], drawn.logprobs, strict=True))

    def test_a_stream_adds_up_to_the_output(self, served: Served) -> None:
        async def streamed(request: GenerateRequest) -> list[TokenChunk]:
            return [chunk async for chunk in served.server.generate_stream(request)]

        whole = served.generate(max_new_tokens=12)
        chunks = served.run(streamed(served.request(max_new_tokens=12)))
        assert tuple(i for chunk in chunks for i in chunk.token_ids) == whole.token_ids
        assert tuple(v for chunk in chunks for v in chunk.weight_versions) == whole.weight_versions
        assert sum(len(chunk.logprobs) for chunk in chunks) == 12
        assert [chunk.finish_reason for chunk in chunks] == [*[None] * (len(chunks) - 1), FinishReason.LENGTH]
        scoring = replace(served.request(), returns_prompt_logprobs=True)
        expect(RequestError, lambda: served.run(streamed(scoring)), "returns_prompt_logprobs")
        expect(RequestError, lambda: served.run(streamed(served.request(()))), "empty")

    def test_what_a_server_cannot_give_is_refused(self, served: Served) -> None:
        can = served.server.capabilities
        if not can.gives_routed_experts:
            request = replace(served.request(), returns_routed_experts=True)
            expect(UnsupportedError, lambda: served.run(served.server.generate(request)), "routed_experts")
        if not can.has_adapters:
            request = replace(served.request(), adapter="mine")
            expect(UnsupportedError, lambda: served.run(served.server.generate(request)), "adapter")
        if not can.takes_images:
            request = replace(served.request(), images=("data:image/png;base64,AA==",))
            expect(UnsupportedError, lambda: served.run(served.server.generate(request)), "images")

    def test_a_bad_request_gets_an_error_and_others_an_answer(self, served: Served) -> None:
        good = served.generate()
        expect(RequestError, lambda: served.generate(()), "empty")
        expect(RequestError, lambda: served.generate((5,) * served.max_model_len), str(served.max_model_len))
        expect(RequestError, lambda: served.generate((5, 10**9)), str(10**9))
        expect(RequestError, lambda: served.generate(temperature=-1.0), "temperature")
        expect(RequestError, lambda: served.generate(top_p=0.0), "top_p")
        expect(RequestError, lambda: served.generate(max_new_tokens=0), "max_new_tokens")
        assert same_tokens(served.generate(), good)


class ServerConformance(ControlConformance, GenerationConformance):
    """Inherit, and give a fixture `served` of module scope. Tests run in order and leave the first weights serving."""

    def test_http_endpoint(self, served: Served) -> None:
        address = served.run(served.server.start())
        if not address.url.startswith("http"):
            return
        health = served.run(_http(f"{address.url}/health", served.api_token))
        assert health["model"] == address.model
        message = {"prompt_token_ids": [5, 6, 7], "sampling_params": {"max_new_tokens": 4, "temperature": 0}}
        answer = served.run(_http(f"{address.url}/generate", served.api_token, message))
        assert tuple(answer["token_ids"]) == served.generate(max_new_tokens=4).token_ids

    def test_stop_ends_it(self, served: Served) -> None:
        """Last: nothing can be asked of the server afterwards."""
        served.run(served.server.stop())
        served.run(served.server.stop())
        expect(ServerLostError, served.generate)


async def _http(url: str, api_token: str | None, message: Any = None) -> Any:
    """GET, or POST a JSON message, without any client library of ours."""
    data = None if message is None else json.dumps(message).encode()
    headers = {"Authorization": f"Bearer {api_token}"} if api_token else {}

    def call() -> Any:
        with urllib.request.urlopen(urllib.request.Request(url, data=data, headers=headers), timeout=30) as answer:
            return json.load(answer)

    return await asyncio.to_thread(call)
