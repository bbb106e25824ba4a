"""Which tokens of a model folder end a turn: by hand-written folders, one for each way in which they differ."""

import json
import sys

import pytest

from rl_csrc.inference import folder_tokens
from rl_csrc.inference.folder_tokens import read_folder_tokens

IM_END = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content | trim }}<|im_end|>\n{% endfor %}"
NAMES = ("<pad>", "<eos>", "<|im_start|>", "<|im_end|>", "<call>")


def folder_of(path, *, config=None, generation=None, template=None, eos="<eos>", config_name="tokenizer_config.json"):
    added = [{"id": i, "content": name, "special": True} for i, name in enumerate(NAMES)]
    vocabulary = {"a": 5, "b": 6, "</s>": 7}
    files = {
        "tokenizer.json": {"model": {"vocab": vocabulary}, "added_tokens": added},
        config_name: {} if eos is None else {"eos_token": eos},
        "config.json": {} if config is None else config,
    }
    if generation is not None:
        files["generation_config.json"] = generation
    for name, values in files.items():
        (path / name).write_text(json.dumps(values))
    if template is not None:
        (path / "chat_template.jinja").write_text(template)
    return path


def test_all_four_sources_count(tmp_path):
    config, generation = {"eos_token_id": 1}, {"eos_token_id": [0, 4]}
    tokens = read_folder_tokens(folder_of(tmp_path, config=config, generation=generation, template=IM_END))
    assert tokens.end_ids == (0, 4, 1, 3)
    assert tokens.turn_end_id == 3
    assert tokens.num_tokens == 8


def test_a_template_with_a_token_that_is_no_eos(tmp_path):
    tokens = read_folder_tokens(folder_of(tmp_path, config={"eos_token_id": 1}, template=IM_END))
    assert tokens.unlisted_id == 3
    assert tokens.lines[0] == "<eos> (1), <|im_end|> (3)"
    assert "ends turns with <|im_end|> (3), which is not an eos_token_id of generation_config.json" in tokens.lines[1]


@pytest.mark.parametrize("source", ["generation", "config"])
def test_a_listed_token_needs_no_warning(tmp_path, source):
    tokens = read_folder_tokens(folder_of(tmp_path, template=IM_END, **{source: {"eos_token_id": [1, 3]}}))
    assert tokens.unlisted_id is None
    assert len(tokens.lines) == 1


@pytest.mark.parametrize(
    ("template", "closing"),
    [
        ("{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}", 1),
        ("{% for m in messages %}{{ m.content }}\n{% endfor %}", None),
        ("{% for m in messages %}{{ m.content[0].text }}<call>{% endfor %}", 4),
        ("{{ raise_exception('no') }}", None),
        # The last turn ends otherwise than those before, which others go on after.
        ("{% for m in messages %}{{ m.content }}{{ '<|im_end|>' if loop.last else '<call>' }}{% endfor %}", 3),
    ],
)
def test_what_templates_end_a_turn_with(tmp_path, template, closing):
    found = read_folder_tokens(folder_of(tmp_path, template=template)).ids_by_source.get("chat template")
    assert found == (None if closing is None else (closing,))


def test_an_eos_token_of_the_plain_vocabulary(tmp_path):
    folder = folder_of(tmp_path, eos={"content": "</s>"}, template="{{ messages[-1].content }}</s>")
    assert read_folder_tokens(folder).ids_by_source == {"tokenizer": (7,), "chat template": (7,)}


def test_ids_of_the_text_part_of_a_multimodal_config(tmp_path):
    assert read_folder_tokens(folder_of(tmp_path, config={"text_config": {"eos_token_id": 4}})).end_ids == (4, 1)


def test_templates_in_the_tokenizers_and_the_processors_files(tmp_path):
    (tmp_path / "listed").mkdir()
    listed = folder_of(tmp_path / "listed")
    named = [{"name": "tool_use", "template": "<call>"}, {"name": "default", "template": IM_END}]
    (listed / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    (tmp_path / "processor").mkdir()
    processor = folder_of(tmp_path / "processor")
    (processor / "chat_template.json").write_text(json.dumps({"chat_template": IM_END}))
    assert [read_folder_tokens(folder).turn_end_id for folder in (listed, processor)] == [3, 3]


def test_a_folder_without_any_file_says_nothing(tmp_path):
    tokens = read_folder_tokens(tmp_path)
    assert (tokens.end_ids, tokens.turn_end_id, tokens.num_tokens) == ((), None, None)
    assert tokens.lines == ["none: completions end at their longest alone"]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("generation_config.json", "{", r"generation_config\.json is not valid JSON"),
        ("config.json", "[]", r"config\.json holds a list, not a JSON object"),
        ("config.json", '{"eos_token_id": "</s>"}', r"config\.json has eos_token_id='</s>'; it must be a token id"),
        ("generation_config.json", '{"eos_token_id": [true]}', "eos_token_id=.True.; it must be a token id"),
    ],
)
def test_files_that_cannot_be_read_are_named(tmp_path, name, text, message):
    (folder_of(tmp_path) / name).write_text(text)
    with pytest.raises(ValueError, match=message):
        read_folder_tokens(tmp_path)


class Spelled:
    """Tokenizer of single characters, and of the names above."""

    def apply_chat_template(self, chat, *, add_generation_prompt, tokenize):
        text = "".join(f"[{m['role'][0]}]{m['content'].strip()}<|im_end|>\n" for m in chat)
        return text + "[a]" * add_generation_prompt

    def encode(self, text, *, add_special_tokens):
        ids = []
        while text:
            name = next((name for name in NAMES if text.startswith(name)), text[0])
            ids.append(NAMES.index(name) if name in NAMES else 100 + ord(name))
            text = text[len(name) :]
        return ids


def test_a_turn_is_trimmed_and_ended_as_the_template_does(tmp_path):
    tokens = read_folder_tokens(folder_of(tmp_path, template=IM_END))
    prompt, said = tokens.turn(Spelled(), [{"role": "user", "content": "q"}], {"role": "assistant", "content": " x "})
    assert prompt == Spelled().encode("[u]q<|im_end|>\n[a]", add_special_tokens=False)
    assert said == [100 + ord("x"), 3]
    assert tokens.ended([9, 3, 8]) == [9, 3]
    assert tokens.ended([9, 8]) == [9, 8, 3]


class Thinking(Spelled):
    """Tokenizer whose template opens a reply with a thought, which it leaves out of a finished one."""

    def apply_chat_template(self, chat, *, add_generation_prompt, tokenize):
        plain = [
            {**m, "content": m["content"].rpartition("</think>")[2] if isinstance(m["content"], str) else ""}
            for m in chat
        ]
        text = super().apply_chat_template(plain, add_generation_prompt=add_generation_prompt, tokenize=tokenize)
        return text + "<think>\n" * add_generation_prompt


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("<think>\na</think>b", "a</think>b"),
        ("<think>a</think>b", "a</think>b"),
        ("b", "b"),
        (None, ""),
        ([{"type": "text", "text": "b"}], "b"),
    ],
)
def test_an_opened_thought_is_not_opened_twice(tmp_path, content, said):
    tokens = read_folder_tokens(folder_of(tmp_path, template=IM_END))
    chat = [{"role": "user", "content": "q"}], {"role": "assistant", "content": content}
    assert tokens.turn(Thinking(), *chat)[1] == [*Spelled().encode(said, add_special_tokens=False), 3]


LOOPS = "{% for a in range(99999) %}{% for b in range(99999) %}x{% endfor %}{% endfor %}"
ENDLESS = {
    "loops": LOOPS,
    "loops over text": "{% set t = 'x' * 9999 %}{% for a in t %}{% for b in t %}{% for c in t %}"
    "{% endfor %}{% endfor %}{% endfor %}",
    "a macro": "{% macro m(n) %}{% for i in range(9) %}{{ m(n - 1) if n }}{% endfor %}{% endmacro %}{{ m(40) }}",
    "growing text": "{% set n = namespace(x='x' * 1024) %}"
    "{% for i in range(99) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
    "with tools": "{% if tools %}" + LOOPS + "{% endif %}",
    "with a system message": "{% if messages[0].role == 'system' %}" + LOOPS + "{% endif %}",
    "before a reply": "{% if add_generation_prompt %}" + LOOPS + "{% endif %}",
}


@pytest.mark.process
@pytest.mark.parametrize("template", ENDLESS.values(), ids=ENDLESS)
def test_a_template_that_does_not_end_is_an_error(tmp_path, monkeypatch, template):
    monkeypatch.setattr(folder_tokens, "_MAX_RENDER_S", 0.3)
    monkeypatch.setattr(folder_tokens, "_MAX_RENDER_BYTES", 1 << 26)
    with pytest.raises(ValueError, match="the chat template of .* does not end"):
        read_folder_tokens(folder_of(tmp_path, template=template))
    assert sys.gettrace() is None or "on_event" not in repr(sys.gettrace())


@pytest.mark.parametrize("operation", ["9**9**9", "9**n", "'x' * 30000000000", "[0] * 9999999", "30000000000 * 'x'"])
def test_an_operation_that_no_deadline_stops_is_an_error(tmp_path, operation):
    template = "{% generation %}{% set n = 9 %}{{ OPERATION }}{% endgeneration %}".replace("OPERATION", operation)
    with pytest.raises(ValueError, match="the chat template of .* may never end"):
        read_folder_tokens(folder_of(tmp_path, template=template))
