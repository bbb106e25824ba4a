"""Environment of examples/actions: a hand that a picture shows reaches a target."""

import math

import numpy

from rl_omni.pictures import observation_of

SIZE, RADIUS = 32, 0.3


class Reach:
    """A hand in a square moves by (dx, dy), one at most, and has three moves to touch the target.

    An observation is a picture of hand and target, and the instruction. Reward: 1 for touching.
    """

    def reset(self, *, seed=None):
        draws = numpy.random.default_rng(seed)
        self.hand, self.target = draws.uniform(-0.9, 0.9, (2, 2))
        while math.dist(self.hand, self.target) < 3 * RADIUS:
            self.target = draws.uniform(-0.9, 0.9, 2)
        self.num_steps = 0
        return self.observation(), {}

    def observation(self):
        pixels = numpy.zeros((SIZE, SIZE, 3), numpy.uint8)
        for point, colour in ((self.target, (220, 40, 40)), (self.hand, (255, 255, 255))):
            x, y = ((point + 1) / 2 * (SIZE - 6)).round().astype(int)
            pixels[y : y + 6, x : x + 6] = colour
        return observation_of(pixels, "reach the target")

    def step(self, action):
        self.hand = numpy.clip(self.hand + numpy.clip(action, -1, 1), -1, 1)
        self.num_steps += 1
        is_there = math.dist(self.hand, self.target) < RADIUS
        return self.observation(), float(is_there), is_there, self.num_steps == 3, {}

    def expert(self):
        """Action that leads straight to the target."""
        return numpy.clip((self.target - self.hand), -1, 1)
