"""Damaged model folders: one error that names the file, the key and the value, before anybody loads them."""

import json
import os

import pytest

from rl_csrc.inference.folder_tokens import read_folder_tokens, read_model_config

GOOD = {"model_type": "llama", "num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 32, "vocab_size": 64}


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(GOOD))
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": {"type": "BPE"}}))
    (tmp_path / "model.safetensors").write_bytes(b"")
    return tmp_path


def test_a_sound_folder_gives_its_config(folder):
    assert read_model_config(folder) == GOOD


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_attention_heads": 0}, "num_attention_heads=0; it must be a whole number from 1"),
        ({"num_key_value_heads": 0}, "num_key_value_heads=0"),
        ({"num_hidden_layers": -1}, "num_hidden_layers=-1"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers=1000000000; it must be a whole number from 1 to 10,000"),
        ({"hidden_size": "64"}, "hidden_size='64'"),
        ({"hidden_size": 0}, "hidden_size=0"),
        ({"hidden_size": True}, "hidden_size=True"),
        ({"vocab_size": 10**12}, "vocab_size=1000000000000"),
        ({"vocab_size": 1.5}, "vocab_size=1.5"),
        ({"text_config": {"num_hidden_layers": 0}}, "num_hidden_layers=0"),
        ({"text_config": "x"}, "text_config='x'; it must be an object"),
        ({"rope_scaling": [1]}, r"rope_scaling=\[1\]; it must be an object"),
        ({"num_key_value_heads": 3}, "num_attention_heads=4 and num_key_value_heads=3; the first must be a multiple"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps=nan; it must be a finite number"),
        ({"rope_parameters": {"rope_theta": float("inf")}}, "rope_theta=inf; it must be a finite number"),
        ({"rope_parameters": {"rope_theta": 0}}, "rope_theta=0; it must be positive"),
        ({"attention_dropout": 2}, "attention_dropout=2; it must be at least 0 and less than 1"),
        ({"pad_token_id": 64}, "pad_token_id=64 and vocab_size=64; ids are less than that"),
        ({"model_type": ["x"]}, r"model_type=\['x'\]; it must be a name"),
    ],
)
def test_a_size_that_no_model_has_is_named(folder, changes, message):
    (folder / "config.json").write_text(json.dumps(GOOD | changes))
    with pytest.raises(ValueError, match=rf"config\.json has {message}"):
        read_model_config(folder)


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("config.json", "", "is not valid JSON"),
        ("config.json", "[]", "holds a list, not a JSON object"),
        ("config.json", "{", "is not valid JSON"),
        ("tokenizer.json", "{}", "has no section `model`"),
        ("tokenizer.json", "[]", "holds a list"),
        ("tokenizer_config.json", "[]", "holds a list"),
        ("special_tokens_map.json", "7", "holds a int"),
        ("generation_config.json", "[]", "holds a list"),
    ],
)
def test_a_damaged_file_is_named(folder, file, text, message):
    read_model_config(folder)  # a sound file that was read before is not taken for the damaged one
    (folder / file).write_text(text)
    with pytest.raises(ValueError, match=rf"{file} {message}"):
        read_model_config(folder)


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("tokenizer.json", b'{"model": {"vocab": [1]}}', "tokenizer.json has a vocabulary that is none"),
        ("tokenizer.json", b'{"model": {}, "added_tokens": "x"}', "are not a list of tokens with id and content"),
        ("tokenizer.json", b'{"model": {}, "added_tokens": [{"id": "a", "content": "b"}]}', "are not a list of tokens"),
        ("tokenizer_config.json", b'{"chat_template": 3}', "chat_template of .* is 3; it must be a text"),
        ("chat_template.jinja", b"\xff\xfe", "chat_template.jinja is not text"),
    ],
)
def test_a_damaged_tokenizer_is_named(folder, file, content, message):
    (folder / file).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        read_folder_tokens(folder)


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin", "tokenizer.json", "generation_config.json"])
def test_a_pipe_is_no_file_of_weights(folder, name):
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)
    with pytest.raises(ValueError, match=rf"{name} is not a regular file"):
        read_model_config(folder)
