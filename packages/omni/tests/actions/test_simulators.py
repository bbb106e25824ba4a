"""MiniGrid and MuJoCo from their pixels: `uv sync --group simulators`, and Mesa's EGL."""

import asyncio
from pathlib import Path

import pytest
import torch
from packages.omni.tests.actions.test_policy_rollout import played

from rl_agent.registry import create_environments
from rl_omni.pictures import picture_of
from rl_omni.testing import write_tiny_policy

pytestmark = pytest.mark.integration
EXAMPLES = Path(__file__).parents[4] / "examples/actions"


def head_of(size):
    return {"kind": "bins", "chunk_size": 1, "action_size": size, "num_bins": 3}


def policy_of(folder, size):
    return str(write_tiny_policy(folder, head_of(size), ("reach", "the", "target"), patch_size=4))


def test_minigrid_is_played_from_pixels(tmp_path):
    pytest.importorskip("minigrid", reason="uv sync --group simulators")
    environment = f"{EXAMPLES / 'grid.py'}:Grid"
    outputs = played(policy_of(tmp_path, 1), 16, environment=environment)
    assert all(each.columns["pictures"].shape == (each.num_turns, 3, 40, 40) for each in outputs)
    assert {each.extra_fields["end"] for each in outputs} == {"terminated", "truncated"}
    for seed in range(8):  # the expert's way leads to the goal
        game = create_environments(environment).make()
        game.reset(seed=seed)
        reward, is_over = 0, False
        while not is_over:
            _, reward, is_there, is_cut, _ = game.step(game.expert())
            is_over = is_there or is_cut
        assert reward == 1


def test_an_arm_of_mujoco_is_moved_from_pixels(tmp_path, monkeypatch):
    monkeypatch.setenv("MUJOCO_GL", "egl")
    pytest.importorskip("mujoco", reason="uv sync --group simulators")
    environment = f"{EXAMPLES / 'arm.py'}:Arm"
    outputs = played(policy_of(tmp_path, 2), 8, environment=environment)
    assert all(each.columns["pictures"].shape == (each.num_turns, 3, 32, 32) for each in outputs)
    assert all((each.reward == 1) == (each.extra_fields["end"] == "terminated") for each in outputs)

    async def alone_and_together():
        """An episode does not see that another shares its simulator."""
        source, seen = create_environments(environment), []
        for others in (0, 2):
            arms = [source.make() for _ in range(1 + others)]
            await asyncio.gather(*(arm.reset(seed=seed) for seed, arm in enumerate(arms)))
            for _ in range(3):
                steps = await asyncio.gather(*(arm.step(torch.ones(2).numpy()) for arm in arms))
            seen.append(picture_of(steps[0][0][0]["image"]))
        return seen

    alone, together = asyncio.run(alone_and_together())
    assert alone.std() > 0.05
    assert torch.equal(alone, together)
