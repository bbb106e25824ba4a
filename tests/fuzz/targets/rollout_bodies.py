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
    routed = b'{"routed_experts": {"shape": [1, 1, 2], "dtype": "int16", "data": "AAEAAg=="}, "request_id": "a", '
    yield routed + b'"token_ids": [1], "logprobs": [null], "weight_versions": [0], "finish_reason": "stop"}'
    yield b'{"error": {"type": "RequestError", "message": "no", "code": 400}, "request_id": "a"}'
    yield b'{"prompt": [1, "a", [2]], "n": 3, "stop": ["a"], "stream_options": {"include_usage": true}}'

    yield b"[" * 3000


def one(data):
    messages.request_id_of(data)
    for kind in KINDS:
        try:
            messages.read_body(data, kind, "/path")
        except RolloutError:
            continue
    for read in (messages.output_from_body, messages.chunk_from_body):
        try:
            read(data)
        except (*messages.NO_MESSAGE, RolloutError):
            continue
    messages.error_from_body(data, "peer")
    messages.request_from_body(data)
