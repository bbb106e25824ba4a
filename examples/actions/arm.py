"""Environment of examples/actions: MuJoCo's Reacher from its pixels.

It needs `pip install 'gymnasium[mujoco]'`, and MUJOCO_GL=egl where there is no screen.
"""

import asyncio
from concurrent.futures import ThreadPoolExecutor

import gymnasium
import numpy

from rl_omni.pictures import observation_of

SIZE, REPEATS, RADIUS = 32, 5, 0.04


class Arm:
    """An arm of two joints touches a red ball with its fingertip; an action is its two torques for five frames.

    Episodes share a simulator, in the one thread that OpenGL's context belongs to, and each has its own state. Reward:
    1 for touching.
    """

    thread, game = ThreadPoolExecutor(1), None

    async def reset(self, *, seed=None):
        return await asyncio.get_running_loop().run_in_executor(self.thread, self._reset, seed)

    async def step(self, action):
        return await asyncio.get_running_loop().run_in_executor(self.thread, self._step, action)

    def _reset(self, seed):
        if Arm.game is None:
            Arm.game = gymnasium.make("Reacher-v5", render_mode="rgb_array", width=SIZE, height=SIZE).unwrapped
        self.game.reset(seed=seed)
        self.num_steps = 0
        return self._observed(), {}

    def _step(self, action):
        self.game.set_state(*self.state)
        for _ in range(REPEATS):
            self.game.step(action)
        self.num_steps += 1
        gap = self.game.get_body_com("fingertip") - self.game.get_body_com("target")
        is_there = bool(numpy.linalg.norm(gap) < RADIUS)
        return self._observed(), float(is_there), is_there, self.num_steps == 10, {}

    def _observed(self):
        self.state = self.game.data.qpos.copy(), self.game.data.qvel.copy()
        return observation_of(self.game.render(), "reach the target")
