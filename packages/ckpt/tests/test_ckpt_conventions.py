"""How every backend takes its URL, its options and its token: alike, and as rl-tq does."""

import importlib.util
import math

import pytest
from ckpt_gpu import fake_gpu, fake_nccl

from rl_ckpt import AddressError, connect
from rl_ckpt.session import capabilities
from rl_ckpt.types import Capability

KERNEL_VOUCHES = ["inproc", "shm", "uds", "cuda-ipc", "file"]
NEEDS_TOKEN = [
    "tcp",
    "gloo",
    "nccl",
    pytest.param("nixl", marks=pytest.mark.skipif(not importlib.util.find_spec("nixl"), reason="nixl is for Linux")),
]
EVERY = [*KERNEL_VOUCHES, *NEEDS_TOKEN]
ROLES = ["send", "receive"]


@pytest.fixture(autouse=True)
def devices(monkeypatch):
    monkeypatch.delenv("RL_CKPT_TOKEN", raising=False)
    with fake_gpu(), fake_nccl():
        yield


@pytest.fixture
def url_of(tmp_path):
    def url(scheme, query=""):
        name = {"file": f"{tmp_path}/policy"}.get(scheme, "127.0.0.1:1" if scheme in TOKENS else "policy")
        return f"{scheme}://{name}{query}"

    return url


TOKENS = {"tcp": "secret", "gloo": "secret", "nccl": "secret", "nixl": "secret"}


def opened(url, role="send", **options):
    """The config of an end that is closed again."""
    scheme = url.partition(":")[0]
    with connect(url, role=role, **({"token": TOKENS.get(scheme)} | options)) as end:
        return end._config


@pytest.mark.parametrize("scheme", EVERY)
@pytest.mark.parametrize("role", ROLES)
def test_one_url_with_every_option_of_connect_is_for_both_ends(scheme, role, url_of):
    promised = capabilities(url_of(scheme))
    is_delta, is_debug = (Capability.DELTA in promised, Capability.VIEWS in promised)
    query = f"?delta={is_delta}&zstd=0&bucket_bytes=4096&debug={is_debug}&timeout_s=7.5"
    config = opened(url_of(scheme, query), role)
    assert (config.bucket_bytes, config.timeout_s, config.zstd) == (4096, 7.5, False)
    assert (config.delta, config.debug) == ((is_delta, False) if role == "send" else (False, is_debug))


@pytest.mark.parametrize("scheme", EVERY)
@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize(
    ("query", "message"),
    [
        ("?token=secret", "ends up in logs"),
        ("?speed=9", "has an option 'speed'; options of this backend: .*of every one: timeout_s"),
        ("?timeout_s=7&timeout_s=7", "gives an option twice"),
        ("?timeout_s", "name=value"),
        ("?timeout_s=soon", "give a number"),
        ("?timeout_s=0", "positive number of seconds"),
        ("?bucket_bytes=1000", "multiple of 256"),
        ("?delta=maybe", "allowed are 1, true, yes, 0, false, no"),
    ],
)
def test_what_a_url_must_not_say_is_refused(scheme, role, query, message, url_of):
    with pytest.raises(AddressError, match=message):
        opened(url_of(scheme, query), role)


@pytest.mark.parametrize("scheme", EVERY)
def test_an_argument_and_the_url_agree(scheme, url_of):
    assert opened(url_of(scheme, "?timeout_s=7"), timeout_s=7).timeout_s == 7
    with pytest.raises(AddressError, match="timeout_s is 7.0 in .* and 8 as an argument; give it once"):
        opened(url_of(scheme, "?timeout_s=7"), timeout_s=8)


@pytest.mark.parametrize("scheme", EVERY)
@pytest.mark.parametrize("timeout_s", [0, -1, math.inf, math.nan])
def test_a_timeout_is_positive_and_finite(scheme, timeout_s, url_of):
    with pytest.raises(AddressError, match="positive number of seconds"):
        opened(url_of(scheme), timeout_s=timeout_s)


@pytest.mark.parametrize("scheme", NEEDS_TOKEN)
@pytest.mark.parametrize("role", ROLES)
def test_over_tcp_a_token_is_an_argument_or_a_variable(scheme, role, url_of, monkeypatch):
    for token in (None, ""):
        with pytest.raises(AddressError, match="needs a token.*token=.*RL_CKPT_TOKEN"):
            opened(url_of(scheme), role, token=token)
    monkeypatch.setenv("RL_CKPT_TOKEN", "of the variable")
    assert opened(url_of(scheme), role, token=None).address == url_of(scheme)


@pytest.mark.parametrize("scheme", KERNEL_VOUCHES)
@pytest.mark.parametrize("role", ROLES)
def test_a_token_is_refused_for_a_peer_vouched_by_the_kernel(scheme, role, url_of, monkeypatch):
    """The environment variable is ignored as well."""
    with pytest.raises(AddressError, match="takes no token"):
        opened(url_of(scheme), role, token="secret")
    monkeypatch.setenv("RL_CKPT_TOKEN", "of another session")
    opened(url_of(scheme), role)
