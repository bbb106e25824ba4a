import asyncio

import pytest

from rl_agent import FailureError, RowError, TemplateError
from rl_agent.loops.single_turn import SingleTurnLoop
from rl_agent.testing import AgentLoopConformance, FakeGenerator, FakeTokenizer

ROW = {"prompt": [{"role": "user", "content": "hi"}]}


class TestSingleTurnConformance(AgentLoopConformance):
    def make_loop(self, server, tokenizer):
        return SingleTurnLoop(server, tokenizer)


def run(server, row, *, tokenizer=None, **sampling_params):
    return asyncio.run(SingleTurnLoop(server, tokenizer or FakeTokenizer()).run(sampling_params, row))


def test_prompt_is_the_template_and_completion_the_sampler_s():
    server = FakeGenerator(lambda _: [100, 101, 1], weight_version=4)
    output = run(server, ROW, temperature=0.5, max_new_tokens=9)
    # <|im_start|> u s e r \n h i <|im_end|> \n <|im_start|> a s s i s t a n t \n, each character + 3
    user, assistant = [ord(c) + 3 for c in "user\nhi"], [ord(c) + 3 for c in "assistant\n"]
    assert output.prompt_token_ids == (0, *user, 1, 13, 0, *assistant)
    assert output.completion_token_ids == (100, 101, 1)
    assert output.loss_mask == (1, 1, 1)
    assert output.rollout_logprobs == (-1 / 64, -2 / 64, -3 / 64)
    assert output.weight_versions == (4, 4, 4)
    assert (output.finish_reason, output.num_turns, output.reward) == ("stop", 1, None)
    assert output.text == "ab"
    assert server.requests[0].sampling_params.temperature == 0.5
    assert server.requests[0].session_id is not None


def test_a_completion_that_ran_out_of_tokens_says_so():
    output = run(FakeGenerator(lambda _: [100] * 8), ROW, max_new_tokens=3)
    assert (output.completion_token_ids, output.finish_reason) == ((100, 100, 100), "length")


def test_a_generation_without_tokens_fails_the_rollout_retryably():
    with pytest.raises(FailureError, match="before its first token") as caught:
        run(FakeGenerator(lambda _: []), ROW)
    assert (caught.value.failure.kind, caught.value.failure.is_retryable) == ("generation", True)


@pytest.mark.parametrize(
    ("row", "sentence"),
    [
        ({}, "field 'prompt' of the row is None"),
        ({"prompt": []}, "at least one"),
        ({"prompt": "hi"}, "needs a list of chat messages"),
        ({"prompt": [{"role": "user"}]}, "message 0 of field 'prompt'"),
        ({"prompt": [{"role": "user", "content": "hi"}, "hello"]}, "message 1 of field 'prompt'"),
    ],
)
def test_a_row_that_cannot_be_run_names_the_field(row, sentence):
    with pytest.raises(RowError, match=sentence):
        run(FakeGenerator(), row)


class Template(FakeTokenizer):
    def __init__(self, result):
        self.result = result

    def apply_chat_template(self, conversation, **kwargs):
        if isinstance(self.result, Exception):
            raise self.result
        return self.result


def test_a_tokenizer_without_template_is_an_error_of_the_run():
    with pytest.raises(TemplateError, match="chat_template is not set"):
        run(FakeGenerator(), ROW, tokenizer=Template(ValueError("chat_template is not set")))
    with pytest.raises(TemplateError, match="a list of token ids is needed"):
        run(FakeGenerator(), ROW, tokenizer=Template({"input_ids": [1]}))


def test_messages_refused_by_the_template_are_a_row_error():
    class TemplateEngineError(Exception):
        pass

    with pytest.raises(RowError, match="roles must alternate"):
        run(FakeGenerator(), ROW, tokenizer=Template(TemplateEngineError("roles must alternate")))
