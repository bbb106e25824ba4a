"""Damaged model folders: one error that names the file, the key and the value, before anybody loads them."""

import json
import os

import pytest

from rl_csrc.inference.folder_tokens import read_model_config

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
    (folder / file).write_text(text)
    with pytest.raises(ValueError, match=rf"{file} {message}"):
        read_model_config(folder)


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
def test_a_pipe_is_no_file_of_weights(folder, name):
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)
    with pytest.raises(ValueError, match=rf"{name} is not a regular file"):
        read_model_config(folder)
