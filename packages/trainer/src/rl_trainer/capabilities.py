"""What the chosen backends can do, held against what the configuration asks of them, before any process starts.

An engine refuses by `rl_engine.check`, a server says it by `rl_rollout.types.Capabilities`, a transport by opening one
end of a session, which calls no peer.
What a server knows only with its model loaded is asked again once it is there, and before anything is generated.
"""

from __future__ import annotations

import asyncio
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import rl_ckpt
import rl_rollout
from rl_ckpt.errors import CkptError
from rl_rollout.errors import RolloutError
from rl_trainer.addresses import IN_ONE_PROCESS, LISTENING, address_of, scheme_of
from rl_trainer.errors import ConfigError
from rl_trainer.pipelines.engines import check_engines, server_config

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from rl_rollout.types import Capabilities
    from rl_trainer.config import Config


@dataclass(frozen=True, slots=True, kw_only=True)
class _Need:
    """Something that a run may ask of its servers."""

    asks: Callable[[Config], bool]
    """Whether a configuration does."""
    is_met: Callable[[Capabilities], bool]
    """Whether a server can."""
    sentence: str
    """What is wrong otherwise, and what to do; after the backend's name."""
    is_known_early: bool = True
    """Whether a server can tell before it has loaded its model."""


_NEEDS = (
    _Need(
        asks=lambda _: True,
        is_met=lambda can: can.takes_token_ids and can.has_logprobs,
        sentence="does not give the ids and log-probs of the tokens that it sampled, so that nothing can be learned "
        "from them; choose another backend",
    ),
    _Need(
        asks=lambda _: True,
        is_met=lambda can: can.updates_weights,
        sentence="takes no new weights with these rollout.options, so that the policy could not be updated; choose "
        "other options, or another backend",
    ),
    _Need(
        asks=lambda config: config.rollout.colocated,
        is_met=lambda can: 2 in can.sleep_levels,
        sentence="cannot give the memory of its weights back with these rollout.options, which rollout.colocated=true "
        "needs; have its options turn sleeping on (vllm: --enable-sleep-mode among args), or set colocated=false",
    ),
    _Need(
        asks=lambda config: config.engine.router_replay,
        is_met=lambda can: can.gives_routed_experts,
        sentence="does not tell the experts that it chose, which engine.router_replay=true needs; have its options "
        "turn that on (vllm: --enable-return-routed-experts among args), or leave router_replay out",
        is_known_early=False,
    ),
)
_IMAGES = _Need(
    asks=lambda _: True,
    is_met=lambda can: can.takes_images,
    sentence="takes no images for this model, and rows of the data have some; choose another backend, or other rows",
    is_known_early=False,
)


def check_backends(config: Config) -> list[tuple[str, str]]:
    """Check the backends' own settings, and what they can do; returns `(what, how)` for the screen.

    Raises:
        ConfigError: a setting does nothing, or asks for what its backend cannot do; names the backend.
    """
    for key in ("weights_transport", "queue_storage"):
        backend: str = getattr(config, key)
        if scheme_of(backend) == IN_ONE_PROCESS and config.runtime != "inline":
            raise ConfigError(
                f"{key}={backend} moves data inside one process, and runtime={config.runtime} has several; choose "
                "another, or runtime=inline"
            )
    _check_transport(config)
    with _folder(config) as folder:
        left = check_engines(config, Path(folder), is_made=config.model.path is not None)
        can = _server_capabilities(config, folder)
    _require(config, can, [need for need in _NEEDS if need.is_known_early])
    levels = " and ".join(str(level) for level in can.sleep_levels) or "none"
    seeds = (
        "seeded requests" if can.is_seeded else "requests without seeds (the same seed samples other tokens each run)"
    )
    return [*left.items(), ("server", f"{config.rollout.backend}: new weights, {seeds}, levels of sleep: {levels}")]


def check_started(config: Config, can: Capabilities, *, has_images: bool) -> None:
    """Check what a server that is there can do.

    Raises:
        ConfigError: less than is asked for.
    """
    _require(config, can, [*_NEEDS, *([_IMAGES] if has_images else [])])


def _require(config: Config, can: Capabilities, needs: list[_Need]) -> None:
    for need in needs:
        if need.asks(config) and not need.is_met(can):
            raise ConfigError(f"rollout.backend={config.rollout.backend} {need.sentence}")


def _check_transport(config: Config) -> None:
    address = address_of(config.weights_transport, "plan", ("127.0.0.1", 1))
    try:
        token = "of the plan" if scheme_of(address) in LISTENING else None
        session = rl_ckpt.connect(address, role="receive", token=token, timeout_s=config.timeout_s)
        asyncio.run(session.close())
    except CkptError as error:
        raise ConfigError(f"weights_transport={config.weights_transport} cannot be used: {error}") from error


def _server_capabilities(config: Config, folder: str) -> Capabilities:
    backend = config.rollout.backend
    asked = replace(server_config(config, Path(folder)), dtype="auto")  # a backend that takes none has worse to say
    try:
        server = rl_rollout.create_server(backend, asked)
        can = server.capabilities
        asyncio.run(server.stop())
    except RolloutError as error:
        raise ConfigError(f"rollout.backend={backend} cannot be used as configured: {error}") from error
    return can


@contextmanager
def _folder(config: Config) -> Generator[str]:
    """The model's folder; where the model is yet to be made, one with its description."""
    if config.model.path is not None:
        yield config.model.path
        return
    from rl_trainer.warmup import write_config

    assert config.model.warmup is not None, "it was checked that there is a model"
    with TemporaryDirectory(prefix="rl-trainer-") as folder:
        write_config(Path(folder), config.model.warmup)
        yield folder
