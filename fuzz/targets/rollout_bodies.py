"""rl-rollout: bodies of requests to a server, and answers of one."""

from rl_rollout.errors import RolloutError
from rl_rollout.http import messages
from rl_rollout.http.openai import ChatCompletionMessage, CompletionMessage

EXPECTED = (RolloutError,)

KINDS = (
    *(messages.RequestMessage, messages.BatchMessage, messages.AbortMessage, messages.PauseMessage),
    *(messages.UpdateMessage, messages.SleepMessage, messages.WakeMessage, messages.PoolingMessage),
    *(CompletionMessage, ChatCompletionMessage),
)


def seeds():
    yield b'{"request_id": "a", "prompt_token_ids": [1, 2], "sampling_params": {"max_new_tokens": 3}}'
    yield b'{"request_id": "a", "prompt_token_ids": [1], "sampled_spans": [[0, 1]], "images": []}'
    yield b'{"token_ids": [1], "logprobs": [-0.5], "weight_versions": [0], "finish_reason": "stop", "request_id": "a"}'
    yield b'{"prompt": [1, "a", [2]], "n": 3, "stop": ["a"], "stream_options": {"include_usage": true}}'

    yield b"[" * 3000


def one(data):
    messages.request_id_of(data)
    for kind in KINDS:
        try:
            messages.read_body(data, kind, "/path")
        except RolloutError:
            continue
    messages.request_from_body(data)
