"""How every storage takes its address, its options and its token: alike, and as rl-ckpt does."""

import importlib.util
import math
import os
import re

import pytest
import torch

import rl_tq
from rl_tq.registry import load_storage

KERNEL_VOUCHES = ["shm", "inproc", "file", "ray"]
NEEDS_TOKEN = ["tcp", "zmq", "nixl"]
MODULES = {"zmq": "zmq", "nixl": "nixl", "ray": "ray"}
LIMITS = ["max_connections", "max_put_bytes"]


def installed(schemes):
    return [
        pytest.param(
            each, marks=pytest.mark.skipif(not importlib.util.find_spec(module), reason=f"{module} is missing")
        )
        if (module := MODULES.get(each))
        else each
        for each in schemes
    ]


EVERY = installed([*KERNEL_VOUCHES, *NEEDS_TOKEN])
OPENABLE = installed([each for each in [*KERNEL_VOUCHES, *NEEDS_TOKEN] if each != "ray"])  # ray needs a cluster
CALLS = pytest.mark.parametrize("call", [rl_tq.serve, rl_tq.connect])


@pytest.fixture(autouse=True)
def no_token(monkeypatch):
    monkeypatch.delenv("RL_TQ_TOKEN", raising=False)


@pytest.fixture
def address_of(tmp_path):
    def address(scheme, query=""):
        name = {"file": f"{tmp_path}/queue"}.get(scheme, "127.0.0.1:0" if scheme in NEEDS_TOKEN else "a-name")
        return f"{scheme}://{name}{query}"

    return address


@pytest.mark.parametrize("scheme", EVERY)
@CALLS
@pytest.mark.parametrize(
    ("query", "message"),
    [
        ("?token=secret", "has a token in it, where logs show it: pass token="),
        ("?speed=9", "does not take 'speed'; its options are .*timeout_s"),
        ("?timeout_s=7&timeout_s=7", "gives 'timeout_s' twice: give it once"),
        ("?timeout_s", "timeout_s='': write a number of seconds"),
        ("?timeout_s=soon", "write a number of seconds"),
        ("?timeout_s=0", "must be more than 0 seconds"),
        ("?timeout_s=nan", "must be more than 0 seconds"),
    ],
)
def test_what_an_address_must_not_say_is_refused(scheme, call, query, message, address_of):
    with pytest.raises(rl_tq.AddressError, match=message):
        call(address_of(scheme, query))


@pytest.mark.parametrize("scheme", EVERY)
@CALLS
def test_an_argument_and_the_address_agree(scheme, call, address_of):
    with pytest.raises(rl_tq.AddressError, match=r"timeout_s=3, and the argument is 4.0: give one of them"):
        call(address_of(scheme, "?timeout_s=3"), timeout_s=4.0)


@pytest.mark.parametrize("scheme", EVERY)
@CALLS
@pytest.mark.parametrize("timeout_s", [0, -1, math.inf, math.nan])
def test_a_timeout_is_positive_and_finite(scheme, call, timeout_s, address_of):
    with pytest.raises(rl_tq.AddressError, match="must be more than 0 seconds, and 1000000 .* at most"):
        call(address_of(scheme), timeout_s=timeout_s)


@pytest.mark.parametrize("scheme", EVERY)
def test_every_option_is_documented_and_is_a_parameter_of_serve(scheme):
    options = getattr(load_storage(scheme), "OPTIONS", {})
    own = {"ray": ["tensor_transport"]}.get(scheme, [])
    assert list(options) == (LIMITS if scheme in NEEDS_TOKEN else own)
    assert all(len(line) > 10 for line in options.values())


@pytest.mark.process
@pytest.mark.parametrize("scheme", OPENABLE)
def test_one_address_with_every_option_is_for_both_ends(scheme, address_of, monkeypatch):
    if scheme == "zmq":  # which says nothing: its silence is what the client notices
        monkeypatch.setattr("rl_tq.storage.zmq._SILENCE_S", 3.0)
    query = "?timeout_s=7" + "&max_connections=9&max_put_bytes=100000" * (scheme in NEEDS_TOKEN)
    with rl_tq.serve(address_of(scheme, query)) as queue, rl_tq.connect(queue.address + query) as client:
        assert (queue.timeout_s, client.timeout_s) == (7.0, 7.0)
        client.put({"a": torch.ones(1)}, partition="p")
        if scheme in NEEDS_TOKEN:
            with pytest.raises((rl_tq.ServerLostError, rl_tq.TransferQueueError)):  # not even read
                client.put({"a": torch.ones(1, 100_000)}, partition="q")


@pytest.mark.parametrize("scheme", installed(NEEDS_TOKEN))
@pytest.mark.parametrize("option", LIMITS)
@pytest.mark.parametrize("value", ["0", "-3", "many", ""])
def test_a_limit_is_a_positive_number(scheme, option, value, address_of):
    with pytest.raises(rl_tq.AddressError, match=rf"{option} is {re.escape(repr(value))}: write a positive number"):
        rl_tq.serve(address_of(scheme, f"?{option}={value}"))


@pytest.mark.process
@pytest.mark.parametrize("scheme", installed(NEEDS_TOKEN))
def test_over_a_network_a_token_is_an_argument_or_a_variable(scheme, address_of, monkeypatch):
    with rl_tq.serve(address_of(scheme), token="secret", timeout_s=20.0) as queue:
        assert "RL_TQ_TOKEN" not in os.environ
        assert "secret" not in queue.address
        for token in (None, ""):
            with pytest.raises(rl_tq.AddressError, match="this process has none: set RL_TQ_TOKEN .* or pass token="):
                rl_tq.connect(queue.address, token=token)
        with pytest.raises(rl_tq.AddressError, match="has another token"):
            rl_tq.connect(queue.address, token="wrong", timeout_s=20.0)
        rl_tq.connect(queue.address, token="secret", timeout_s=20.0).close()
        monkeypatch.setenv("RL_TQ_TOKEN", "secret")
        rl_tq.connect(queue.address, timeout_s=20.0).close()


@pytest.mark.process
@pytest.mark.parametrize("scheme", installed(KERNEL_VOUCHES))
def test_a_token_is_refused_for_a_peer_vouched_by_the_kernel(scheme, address_of, monkeypatch):
    """The environment variable is ignored as well."""
    for call in (rl_tq.serve, rl_tq.connect):
        with pytest.raises(rl_tq.AddressError, match=f"{scheme}:// takes no token: the kernel says who"):
            call(address_of(scheme), token="x")
    if scheme == "ray":
        return  # the rest needs a cluster
    monkeypatch.setenv("RL_TQ_TOKEN", "of another session")
    rl_tq.serve(address_of(scheme)).close()
    with rl_tq.serve(address_of(scheme), token="x", also=["tcp://127.0.0.1:0"]) as queue:
        rl_tq.connect(queue.addresses[1], token="x").close()
        with pytest.raises(rl_tq.AddressError, match="has another token"):
            rl_tq.connect(queue.addresses[1], token="y")


def test_an_unknown_scheme_lists_what_is_installed():
    for call in (rl_tq.serve, rl_tq.connect):
        with pytest.raises(rl_tq.StorageError, match=r"no storage 'smoke'; installed are \[.*'shm'"):
            call("smoke://a-name")


def test_every_error_is_one_of_the_library_and_one_of_python():
    errors = [each for each in vars(rl_tq).values() if isinstance(each, type) and issubclass(each, Exception)]
    assert len(errors) == 12
    for error in errors:
        assert issubclass(error, rl_tq.TransferQueueError)
        builtin = [base for base in error.__mro__ if base.__module__ == "builtins" and base not in (Exception, object)]
        assert error is rl_tq.TransferQueueError or [each for each in builtin if each is not BaseException], error
        assert error.__name__.endswith("Error")
