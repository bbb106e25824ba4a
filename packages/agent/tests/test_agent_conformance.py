"""The conformance suite finds what it is there to find: each loop here breaks one rule."""

import asyncio
from dataclasses import replace

import pytest

from rl_agent import OutputError
from rl_agent.loops.single_turn import SingleTurnLoop
from rl_agent.testing import AgentLoopConformance
from rl_rollout.errors import RequestError, ServerLostError


class Retokenising(SingleTurnLoop):
    """Goes through text, and loses the end of the turn."""

    async def run(self, sampling_params, row):
        output = await super().run(sampling_params, row)
        ids = tuple(self.tokenizer.encode(output.text))
        return replace(
            output,
            completion_token_ids=ids,
            loss_mask=(1,) * len(ids),
            rollout_logprobs=output.rollout_logprobs[: len(ids)],
            weight_versions=output.weight_versions[: len(ids)],
        )


class Marking(SingleTurnLoop):
    """Claims that the model wrote a token that it did not write."""

    async def run(self, sampling_params, row):
        output = await super().run(sampling_params, row)
        return replace(
            output,
            completion_token_ids=(*output.completion_token_ids, 13),
            loss_mask=(*output.loss_mask, 1),
            rollout_logprobs=(*output.rollout_logprobs, 0.0),
            weight_versions=(*output.weight_versions, 0),
        )


class Unaligned(SingleTurnLoop):
    """Loses a log-prob."""

    async def run(self, sampling_params, row):
        output = await super().run(sampling_params, row)
        return replace(output, rollout_logprobs=output.rollout_logprobs[1:])


class Stateful(SingleTurnLoop):
    """Keeps the row on itself, where the next one overwrites it."""

    async def run(self, sampling_params, row):
        self.row = row
        await asyncio.sleep(0)
        return await super().run(sampling_params, self.row)


class Swallowing(SingleTurnLoop):
    """Hides that the server is gone."""

    async def run(self, sampling_params, row):
        try:
            return await super().run(sampling_params, row)
        except ServerLostError:
            return []


class Careless(SingleTurnLoop):
    """Makes up a prompt where the row has none."""

    async def run(self, sampling_params, row):
        return await super().run(sampling_params, {"prompt": [{"role": "user", "content": ""}], **row})


class Stubborn(SingleTurnLoop):
    """Returns when it is cancelled, as if it had ended."""

    async def run(self, sampling_params, row):
        try:
            return await super().run(sampling_params, row)
        except asyncio.CancelledError:
            return []


class Deaf(SingleTurnLoop):
    """Samples as it likes."""

    async def run(self, sampling_params, row):
        return await super().run({"max_new_tokens": sampling_params["max_new_tokens"]}, row)


class Nameless(SingleTurnLoop):
    """Gives all of its requests one id."""

    async def run(self, sampling_params, row):
        loop = SingleTurnLoop(self, self.tokenizer)
        return await loop.run(sampling_params, row)

    async def generate(self, request):
        return await self.server.generate(replace(request, request_id="mine"))


@pytest.mark.parametrize(
    ("loop", "test", "error"),
    [
        (Retokenising, "test_emitted_tokens_are_kept_and_context_is_only_appended_to", AssertionError),
        (Marking, "test_the_mask_marks_exactly_what_the_model_wrote", AssertionError),
        (Unaligned, "test_outputs_are_valid", OutputError),
        (Stateful, "test_rows_run_at_the_same_time_do_not_mix", AssertionError),
        (Deaf, "test_every_request_has_the_given_sampling_parameters", AssertionError),
        (Nameless, "test_rows_run_at_the_same_time_do_not_mix", RequestError),
        (Swallowing, "test_a_lost_server_is_not_swallowed", AssertionError),
        (Careless, "test_a_row_without_its_fields_is_refused", AssertionError),
        (Stubborn, "test_cancellation_ends_it", AssertionError),
    ],
)
def test_a_loop_that_breaks_a_rule_is_found(loop, test, error):
    suite = AgentLoopConformance()
    suite.make_loop = loop
    with pytest.raises(error):
        getattr(suite, test)()
