"""What a refusal advises, applied to what it refuses, is accepted."""

import pytest

from rl_ckpt import connect
from rl_ckpt.errors import CkptError

ADVICE = [
    ("tcp://127.0.0.1:45678", {}, r"pass token=\.\.\. to connect", "tcp://127.0.0.1:45678", {"token": "x"}),
    ("tcp://127.0.0.1:45678?token=x", {}, r"pass token=", "tcp://127.0.0.1:45678", {"token": "x"}),
    ("inproc://a?timeout_s=5", {"timeout_s": 6.0}, r"give it once", "inproc://a?timeout_s=5", {}),
    ("inproc://a", {"timeout_s": 0.0}, r"give a positive number", "inproc://a", {"timeout_s": 1.0}),
    ("inproc://a", {"bucket_bytes": 100}, r"give a positive multiple of 256", "inproc://a", {"bucket_bytes": 256}),
    ("inproc://a?bucket_bytes=x", {}, r"give a number", "inproc://a?bucket_bytes=256", {}),
    ("inproc://a", {"zstd": True}, r"none without delta=True", "inproc://a", {"zstd": True, "delta": True}),
    ("inproc://a?delta", {}, r"write options as \?name=value", "inproc://a?delta=1", {}),
]


@pytest.fixture(autouse=True)
def no_token(monkeypatch):
    monkeypatch.delenv("RL_CKPT_TOKEN", raising=False)


@pytest.mark.parametrize(("url", "given", "words", "other", "changed"), ADVICE, ids=[each[2] for each in ADVICE])
def test_advice_on_a_session_is_accepted(url, given, words, other, changed):
    with pytest.raises((CkptError, ValueError), match=words):
        connect(url, role="send", **given)
    with connect(other, role="send", **changed):
        pass
