from rl_agent.chat_template import CachedTokenizer


class Tokenizer:
    eos_token_id = 7

    def __init__(self):
        self.rendered = []

    def apply_chat_template(self, conversation, **kwargs):
        self.rendered.append(conversation)
        return [len(message["content"]) for message in conversation] + [len(kwargs)]


def chat(*contents):
    return [{"role": "user", "content": content} for content in contents]


def test_a_prompt_is_rendered_once_and_its_cache_is_immutable():
    tokenizer = Tokenizer()
    cached = CachedTokenizer(tokenizer)
    first = cached.apply_chat_template(chat("abc"), tokenize=True)
    first.append(99)
    assert cached.apply_chat_template(chat("abc"), tokenize=True) == [3, 1]
    assert len(tokenizer.rendered) == 1
    assert cached.apply_chat_template(chat("abc")) == [3, 0]
    assert cached.apply_chat_template(chat("ab", "c"), tokenize=True) == [2, 1, 1]
    assert len(tokenizer.rendered) == 3
    assert cached.eos_token_id == 7


def test_incomparable_prompts_are_rendered_anew_and_old_ones_go():
    tokenizer = Tokenizer()
    cached = CachedTokenizer(tokenizer)
    for _ in range(2):
        assert cached.apply_chat_template(chat(b"abc")) == [3, 0]
    assert len(tokenizer.rendered) == 2
    for number in range(1500):
        cached.apply_chat_template(chat(str(number)))
    cached.apply_chat_template(chat("1499"))
    assert len(tokenizer.rendered) == 2 + 1500
    cached.apply_chat_template(chat("0"))
    assert len(tokenizer.rendered) == 2 + 1501
