"""The chat template of a real Hugging Face tokenizer, built here: one token per character."""

import asyncio
import string

import pytest

from rl_agent import RowError, TemplateError, create_loop, load_tokenizer, tokenize_prompt, tokenize_prompts
from rl_agent.testing import FakeGenerator

transformers = pytest.importorskip("transformers", reason="needs the extra rl-agent[hf]")
tokenizers = pytest.importorskip("tokenizers")

TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    "<u>{{ m.content }}<e>{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
)


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    specials = ["<pad>", "<u>", "<a>", "<e>"]
    vocab = {token: i for i, token in enumerate([*specials, *string.ascii_lowercase])}
    core = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token="<pad>"))
    core.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    core.decoder = tokenizers.decoders.Fuse()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="<pad>", eos_token="<e>", additional_special_tokens=["<u>", "<a>"]
    )
    tokenizer.chat_template = TEMPLATE
    path = tmp_path_factory.mktemp("tokenizer")
    tokenizer.save_pretrained(path)
    return str(path)


def run(tokenizer, messages):
    loop = create_loop("single_turn", FakeGenerator(lambda _: [4, 5, 6, 3]), tokenizer)
    return asyncio.run(loop.run({}, {"prompt": messages}))


def test_the_prompt_is_what_the_template_renders(model_path):
    output = run(load_tokenizer(model_path), [{"role": "user", "content": "cab"}])
    assert output.prompt_token_ids == (1, 6, 4, 5, 3, 2)  # <u> c a b <e> <a>
    assert output.text == "abc"


def test_messages_that_the_template_refuses_are_a_row_error(model_path):
    with pytest.raises(RowError, match="no tools here"):
        run(load_tokenizer(model_path), [{"role": "tool", "content": "cab"}])


def test_a_tokenizer_without_template_is_a_template_error(model_path):
    tokenizer = load_tokenizer(model_path)
    tokenizer.chat_template = None
    with pytest.raises(TemplateError, match="chat_template"):
        run(tokenizer, [{"role": "user", "content": "cab"}])


@pytest.mark.process
@pytest.mark.parametrize("takes_many", [True, False])
def test_batch_tokenization_equals_single_and_names_a_bad_row(model_path, takes_many):
    """The row that is wrong raises, as it does when tokenized alone."""
    tokenizer, calls = load_tokenizer(model_path), []
    render = tokenizer.apply_chat_template

    def counted(conversation, **options):
        calls.append(conversation)
        if not takes_many and not hasattr(conversation[0], "keys"):
            raise AttributeError("list object has no attribute role")
        return render(conversation, **options)

    tokenizer.apply_chat_template = counted
    rows = [{"prompt": [{"role": "user", "content": "ab" * (n % 3 + 1)}]} for n in range(2000)]
    wanted = [tokenize_prompt(tokenizer, row) for row in rows]
    calls.clear()
    assert list(tokenize_prompts(tokenizer, rows)) == wanted
    assert len(calls) == 2 if takes_many else 2002
    rows[1500] = {"prompt": [{"role": "tool", "content": "a"}]}
    found = tokenize_prompts(tokenizer, rows)
    assert [next(found) for _ in range(1500)] == wanted[:1500]
    with pytest.raises(RowError, match="no tools here"):
        next(found)
