"""The public surface: names, URLs, backends, and what an import brings along."""

import subprocess
import sys
from importlib.metadata import EntryPoint

import pytest

import rl_ckpt
from rl_ckpt import errors, session


def test_public_names():
    assert sorted(rl_ckpt.__all__) == [
        "Address",
        "AddressError",
        "Addresses",
        "AttestationError",
        "BackendError",
        "CheckpointEngine",
        "CkptError",
        "DigestError",
        "DigestShare",
        "Metadata",
        "PeerLostError",
        "PeerTimeoutError",
        "Placement",
        "ProtocolError",
        "Receipt",
        "ReceiverState",
        "Resharding",
        "Role",
        "SessionConfig",
        "ShardPlan",
        "ShardSender",
        "ShardSpec",
        "ShardedReceiver",
        "ShardedSender",
        "SyncAbortedError",
        "SyncReport",
        "TensorError",
        "UsageError",
        "VersionError",
        "WeightReceiver",
        "WeightSender",
        "capabilities",
        "connect",
        "create_sender",
        "join_addresses",
        "join_digest",
        "merge_reports",
        "read_layouts",
        "relay_address",
        "tree_digest",
        "write_layout_request",
    ]
    assert all(hasattr(rl_ckpt, name) for name in rl_ckpt.__all__)


def test_the_error_tree_is_drawn_as_it_is():
    for name, error in vars(errors).items():
        if isinstance(error, type) and error not in (errors.CkptError, *errors.CkptError.__mro__):
            base = error.__mro__[2]
            assert issubclass(error, errors.CkptError)
            assert f"{name} ({base.__name__})" in errors.__doc__


@pytest.mark.promise("Importing it brings neither torch nor a sibling")
@pytest.mark.process
def test_import_brings_neither_torch_nor_a_sibling():
    code = "import sys, rl_ckpt; print(*sorted({m.partition('.')[0] for m in sys.modules}))"
    modules = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split()
    heavy = {"torch", "ray", "transformers", "numpy", "rl_csrc", "rl_engine", "rl_rollout", "rl_tq", "rl_trainer"}
    assert heavy.isdisjoint(modules)


@pytest.mark.parametrize("url", ["", "shm", "shm://", "://x", "policy"])
def test_a_url_without_scheme_or_name(url):
    with pytest.raises(rl_ckpt.AddressError, match="scheme://name"):
        rl_ckpt.connect(url, role="send")


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("shm://x?streams=2", "options of this backend: none"),
        ("uds://x?stream=2", "has an option 'stream'; options of this backend: streams"),
        ("uds://x?streams=2&streams=3", "twice"),
        ("uds://x?streams", "name=value"),
        ("uds://x?streams=0", "allowed are 1 to 64"),
        ("shm://x?delta=maybe", "delta is 'maybe'.*allowed are 1, true, yes, 0, false, no"),
        ("shm://x?bucket_bytes=many", "give a number"),
        ("shm://x?bucket_bytes=100", "multiple of 256"),
        ("shm://x?zstd=1", "none without delta"),
        ("shm://x?token=secret", "ends up in logs"),
        ("tcp://localhost", "tcp://host:port"),
        ("tcp://localhost:99999", "tcp://host:port"),
    ],
)
def test_options_of_a_url_are_taken_or_refused(url, message):
    with pytest.raises(rl_ckpt.AddressError, match=message):
        rl_ckpt.connect(url, role="send")


def test_tcp_wants_a_token_and_the_others_want_none(monkeypatch):
    monkeypatch.delenv("RL_CKPT_TOKEN", raising=False)
    with pytest.raises(rl_ckpt.AddressError, match="needs a token"):
        rl_ckpt.connect("tcp://localhost:1", role="send")
    with pytest.raises(rl_ckpt.AddressError, match="takes no token"):
        rl_ckpt.connect("inproc://x", role="send", token="secret")


@pytest.mark.parametrize("url", ["shm://a/b", "inproc://a b", "shm://" + "x" * 65])
def test_a_name_with_other_characters(url):
    with pytest.raises(rl_ckpt.AddressError, match="allowed are 1 to 64 of A-Z"):
        rl_ckpt.connect(url, role="send")


@pytest.mark.parametrize(
    ("option", "value", "allowed"),
    [
        ("role", "sender", "'send' and 'receive'"),
        ("timeout_s", 0, "positive number of seconds"),
        ("timeout_s", float("inf"), "positive number of seconds"),
        ("bucket_bytes", 1000, "multiple of 256"),
        ("bucket_bytes", 0, "multiple of 256"),
        ("delta", True, "is for the sender"),
    ],
)
def test_options_out_of_range_name_what_is_allowed(option, value, allowed):
    with pytest.raises(rl_ckpt.AddressError, match=allowed):
        rl_ckpt.connect("inproc://x", **({"role": "receive"} | {option: value}))


def test_an_unknown_backend_lists_what_is_installed():
    with pytest.raises(
        rl_ckpt.BackendError, match="no backend 'smh'.*cuda-ipc, file, gloo, inproc, nccl, nixl, shm, tcp, uds"
    ):
        rl_ckpt.connect("smh://x", role="send")


def test_a_backend_that_cannot_be_imported_says_what_to_install(monkeypatch):
    entry = EntryPoint("broken", "no_such_module_anywhere", session.GROUP)
    monkeypatch.setattr(session, "entry_points", lambda group: [entry])
    with pytest.raises(rl_ckpt.BackendError, match="pip install.*no_such_module_anywhere") as caught:
        rl_ckpt.connect("broken://x", role="send")
    assert isinstance(caught.value.__cause__, ImportError)


def test_an_entry_point_that_is_no_backend(monkeypatch):
    entry = EntryPoint("json", "json", session.GROUP)
    monkeypatch.setattr(session, "entry_points", lambda group: [entry])
    with pytest.raises(rl_ckpt.BackendError, match="no class Backend"):
        rl_ckpt.connect("json://x", role="send")


def test_connect_options_can_be_in_the_url_of_both_ends():
    url = "inproc://x?delta=1&bucket_bytes=4096&debug=true&timeout_s=7"
    with rl_ckpt.connect(url, role="send") as sender, rl_ckpt.connect(url, role="receive") as receiver:
        sent, received = sender._config, receiver._config
    assert (sent.delta, sent.debug, sent.bucket_bytes, sent.timeout_s) == (True, False, 4096, 7.0)
    assert (received.delta, received.debug, received.timeout_s) == (False, True, 7.0)
    assert sent.options == ()


def test_an_argument_and_a_url_that_differ_are_an_error():
    with rl_ckpt.connect("inproc://x?delta=1", role="send", delta=True):
        pass
    with pytest.raises(rl_ckpt.AddressError, match="bucket_bytes is 512 in .* and 256 as an argument; give it once"):
        rl_ckpt.connect("inproc://x?bucket_bytes=512", role="send", bucket_bytes=256)


def test_every_backend_documents_its_options():
    from rl_ckpt.backends import cuda_ipc, file, gloo, inproc, nccl, shm, tcp, uds

    documented = {
        backend.__name__.rpartition(".")[2]: backend.Backend.options
        for backend in (cuda_ipc, file, gloo, inproc, nccl, shm, tcp, uds)
    }
    assert {name: set(options) for name, options in documented.items() if options} == {
        "file": {"keep", "chain"},
        "tcp": {"streams"},
        "uds": {"streams"},
    }
    assert all(len(text) > 10 for options in documented.values() for text in options.values())
