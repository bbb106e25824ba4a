"""One conversation as it grows: what is asked, what is appended, and when no room is left."""

import asyncio

import pytest

from rl_agent.chat_template import TurnTemplate
from rl_agent.session import Session
from rl_agent.testing import FakeGenerator, FakeTokenizer

TOKENIZER = FakeTokenizer()
QUESTION, NEXT = {"role": "user", "content": "go"}, {"role": "user", "content": "on"}


def begun(reply="abc", **settings):
    """A session whose model has written its first turn."""
    ids = [*TOKENIZER.encode(reply), TOKENIZER.eos_token_id]
    template = TurnTemplate(TOKENIZER)
    params = {"max_new_tokens": settings.pop("max_new_tokens", 64)}
    session = Session(
        FakeGenerator(lambda _: ids), TOKENIZER, template.prompt([QUESTION]), params, template=template, **settings
    )
    asyncio.run(session.generate())
    return session


def test_context_is_appended_only_before_a_token_of_the_model():
    session = begun()
    assert session.append([NEXT])
    needed = session.num_tokens
    full = begun(max_completion_tokens=needed)
    assert not full.append([NEXT]), "not one token could be generated"
    assert full.num_tokens == 4
    assert begun(max_completion_tokens=needed + 1).append([NEXT])


@pytest.mark.parametrize(("max_new_tokens", "text"), [(64, "abc"), (2, "ab")])
def test_a_parser_gets_all_but_the_stop_token(max_new_tokens, text):
    assert begun(max_new_tokens=max_new_tokens).last_marked_text == text
