"""rl-rollout: bodies of requests to a server, and answers of one."""

from rl_rollout import _wire
from rl_rollout.errors import RolloutError

EXPECTED = (RolloutError,)


def seeds():
    yield b'{"request_id": "a", "prompt_token_ids": [1, 2], "sampling_params": {"max_new_tokens": 3}}'
    yield b'{"request_id": "a", "prompt_token_ids": [1], "sampled_spans": [[0, 1]], "images": []}'
    yield b'{"token_ids": [1], "logprobs": [-0.5], "weight_versions": [0], "finish_reason": "stop", "request_id": "a"}'

    yield b"[" * 3000


def one(data):
    message = _wire.object_from_body(data, "/generate")
    _wire.request_from_json(message)
