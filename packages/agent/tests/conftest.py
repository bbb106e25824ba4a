"""Tokenizers with chat templates of the common families: small ones of our own, with each family's quirks."""

import pytest

# name: (special tokens, end of turn, template)
FAMILIES = {
    # ChatML. Reasoning of earlier turns is dropped; the answers of one turn's calls share a user turn.
    "qwen": (
        ["<|im_start|>", "<|im_end|>"],
        "<|im_end|>",
        "{% if tools %}<|im_start|>system\n{% for t in tools %}{{ t | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}"
        "{% for m in messages %}{% if m.role == 'assistant' %}<|im_start|>assistant\n"
        "{{ m.content if loop.last else m.content.split('</think>')[-1] }}"
        '{% for c in m.tool_calls or [] %}\n<tool_call>\n{"name": "{{ c.function.name }}", "arguments": '
        "{{ c.function.arguments | tojson }}}\n</tool_call>{% endfor %}<|im_end|>\n"
        "{% elif m.role == 'tool' %}{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user"
        "{% endif %}{{ '\n<tool_response>\n' }}{{ m.content }}\n</tool_response>"
        "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>\n{% endif %}"
        "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    ),
    # One call per turn only; a call's turn ends in another token than an answer's.
    "llama": (
        ["<|bos|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>", "<|python_tag|>"],
        "<|eot_id|>",
        "<|bos|>{% for m in messages %}{% if m.tool_calls %}{% if m.tool_calls | length != 1 %}"
        "{{ raise_exception('one tool call at once') }}{% endif %}<|start_header_id|>assistant<|end_header_id|>\n\n"
        '{"name": "{{ m.tool_calls[0].function.name }}", "parameters": '
        "{{ m.tool_calls[0].function.arguments | tojson }}}<|eot_id|>"
        "{% elif m.role == 'tool' %}<|start_header_id|>ipython<|end_header_id|>\n\n{{ m.content | tojson }}<|eot_id|>"
        "{% else %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n{{ m.content | trim }}<|eot_id|>{% endif %}"
        "{% endfor %}{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}",
    ),
    # No header for the assistant; ids of calls have nine characters.
    "mistral": (
        ["<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"],
        "</s>",
        "<s>{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }}[/INST]"
        "{% elif m.tool_calls %}[TOOL_CALLS] [{% for c in m.tool_calls %}{% if c.id | length != 9 %}"
        '{{ raise_exception(\'ids need 9 characters\') }}{% endif %}{"name": "{{ c.function.name }}", "arguments": '
        '{{ c.function.arguments | tojson }}, "id": "{{ c.id }}"}{% if not loop.last %}, {% endif %}{% endfor %}]'
        "</s>{% elif m.role == 'assistant' %} {{ m.content }}</s>"
        '{% elif m.role == \'tool\' %}[TOOL_RESULTS] {"content": {{ m.content | tojson }}, "call_id": '
        '"{{ m.tool_call_id }}"}[/TOOL_RESULTS]{% endif %}{% endfor %}',
    ),
    # Arguments are a string; the end of a turn and the next header stand side by side.
    "deepseek": (
        ["<b>", "<e>", "<U>", "<A>", "<calls>", "</calls>", "<call>", "</call>", "<sep>", "<out>", "</out>"],
        "<e>",
        "<b>{% for m in messages %}{% if m.role == 'user' %}<U>{{ m.content }}<A>"
        "{% elif m.role == 'assistant' %}{{ m.content }}{% if m.tool_calls %}<calls>{% for c in m.tool_calls %}<call>"
        "{{ c.function.name + '<sep>' + c.function.arguments }}</call>{% endfor %}</calls>{% endif %}<e>"
        "{% elif m.role == 'tool' %}<out>{{ m.content }}</out>{% endif %}{% endfor %}",
    ),
    # Nothing closes an assistant's turn but the next turn's header, which is what the model stops at.
    "glm": (
        ["<|user|>", "<|assistant|>", "<|observation|>"],
        "<|user|>",
        "{% for m in messages %}{% if m.role == 'tool' %}"
        "{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|observation|>{% endif %}"
        "{{ '\n<tool_response>\n' }}{{ m.content }}\n</tool_response>"
        "{% else %}<|{{ m.role }}|>\n{{ m.content }}{% for c in m.tool_calls or [] %}\n<tool_call>{{ c.function.name }}"
        "{% for k, v in c.function.arguments.items() %}\n<arg_key>{{ k }}</arg_key>\n<arg_value>{{ v }}</arg_value>"
        "{% endfor %}\n</tool_call>{% endfor %}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>\n{% endif %}",
    ),
    # The last turn ends in <|return|>, an earlier one in <|end|>, a call in <|call|>; answers name their tool.
    "gpt_oss": (
        ["<|start|>", "<|end|>", "<|return|>", "<|call|>", "<|channel|>", "<|message|>"],
        "<|return|>",
        "{% for m in messages %}{% if m.tool_calls %}<|start|>assistant"
        " to=functions.{{ m.tool_calls[0].function.name }}"
        "<|channel|>commentary json<|message|>{{ m.tool_calls[0].function.arguments | tojson }}<|call|>"
        "{% elif m.role == 'assistant' %}<|start|>assistant<|channel|>final<|message|>{{ m.content }}"
        "{% if loop.last and not add_generation_prompt %}<|return|>{% else %}<|end|>{% endif %}"
        "{% elif m.role == 'tool' %}<|start|>functions.{{ m.name }} to=assistant<|channel|>commentary<|message|>"
        "{{ m.content | tojson }}<|end|>{% else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}"
        "{% endfor %}{% if add_generation_prompt %}<|start|>assistant{% endif %}",
    ),
    # One token ends every role's message; an answer of a tool stands in a system message and names the call.
    "kimi": (
        ["<|im_user|>", "<|im_assistant|>", "<|im_system|>", "<|im_middle|>", "<|im_end|>", "<|tool_calls|>"],
        "<|im_end|>",
        "{% for m in messages %}{% if m.role == 'tool' %}<|im_system|>{{ m.name }}<|im_middle|>## Return of "
        "{{ m.tool_call_id }}\n{{ m.content }}{% else %}<|im_{{ m.role }}|>{{ m.role }}<|im_middle|>{{ m.content }}"
        "{% if m.tool_calls %}<|tool_calls|>{% for c in m.tool_calls %}{{ c.id }}{{ c.function.arguments | tojson }}"
        "{% endfor %}{% endif %}{% endif %}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}<|im_assistant|>assistant<|im_middle|>{% endif %}",
    ),
    # The quickstart's: every role has a header, and calls are not rendered.
    "plain": (
        ["<eos>", "<|user|>", "<|assistant|>", "<|tool|>"],
        "<eos>",
        "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% if m.role == 'assistant' %}<eos>{% endif %}"
        "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}",
    ),
}


@pytest.fixture(scope="session")
def make_tokenizer():
    """A Hugging Face tokenizer of one token per character, with the chat template of a family."""
    transformers = pytest.importorskip("transformers", reason="needs the extra rl-agent[hf]")
    tokenizers = pytest.importorskip("tokenizers")

    def make(family, template=None):
        specials, end, own = FAMILIES[family]
        characters = ["\n", *map(chr, range(32, 127))]
        vocab = {token: i for i, token in enumerate(["<unk>", *specials, *characters])}
        core = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token="<unk>"))
        core.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex(r"[\s\S]"), "isolated")
        core.decoder = tokenizers.decoders.Fuse()
        bos = {"llama": "<|bos|>", "mistral": "<s>", "deepseek": "<b>"}.get(family)
        if bos is not None:  # added to whatever is encoded, unless told not to
            one = [(bos, vocab[bos])]
            core.post_processor = tokenizers.processors.TemplateProcessing(single=f"{bos} $A", special_tokens=one)
        core.add_special_tokens(specials)  # flagged, and without a role but for the end: so are most families' own
        tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=core, unk_token="<unk>", eos_token=end)
        tokenizer.chat_template = template or own
        return tokenizer

    return make
