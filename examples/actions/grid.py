"""Environment of examples/actions: MiniGrid from its pixels (pip install minigrid)."""

import gymnasium
import minigrid.wrappers

from rl_omni.pictures import observation_of


class Grid:
    """A triangle turns and walks in a room of five by five to the green square, wherever it starts.

    An action is a number: the first third turns left, the second turns right, the last walks. Reward: 1 for arriving.
    """

    def __init__(self, name="MiniGrid-Empty-Random-5x5-v0", num_steps=12):
        game = gymnasium.make(name, max_steps=num_steps, highlight=False)
        self.game = minigrid.wrappers.RGBImgObsWrapper(game, tile_size=8)

    def reset(self, *, seed=None):
        observed, info = self.game.reset(seed=seed)
        return observation_of(observed["image"], "reach the target"), info

    def step(self, action):
        observed, reward, is_there, is_over, info = self.game.step(min(int((action[0] + 1) * 1.5), 2))
        return observation_of(observed["image"], "reach the target"), float(reward > 0), is_there, is_over, info

    def expert(self):
        """Action that leads to the green square, in the lower right corner, by a shortest way."""
        (x, y), direction = self.game.unwrapped.agent_pos, self.game.unwrapped.agent_dir
        wanted = {d for d, is_open in ((0, x < 3), (1, y < 3)) if is_open}
        turn = 0 if (direction - 1) % 4 in wanted else 1
        return [(-2 / 3, 0.0, 2 / 3)[2 if direction in wanted else turn]]
