"""Rewards on pictures that are functions of the pixels alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from rl_omni.pictures import picture_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor


def colour(text: str, row: Mapping[str, Any]) -> float:
    """`colour_reward` of a picture as a data URL; the row's ground truth is the colour, such as `0.8 0.2 0.2`."""
    return colour_reward(picture_of(text), [float(each) for each in row["reward_model"]["ground_truth"].split()])


def colour_reward(picture: Tensor, rgb: Sequence[float]) -> float:
    """Closeness of a (3, H, W) picture to a colour: 1 - mean absolute difference; 1 if every pixel has the colour."""
    target = torch.tensor(rgb, dtype=picture.dtype).view(3, 1, 1)
    return 1.0 - float((picture - target).abs().mean())


def colourfulness(picture: Tensor) -> float:
    """Colourfulness of a (3, H, W) picture by Hasler and Suesstrunk (2003), on channels from 0 to 1.

    0 for grey pictures.
    """
    red, green, blue = picture
    first, second = red - green, (red + green) / 2 - blue
    spread = torch.stack([first.std(correction=0), second.std(correction=0)]).norm()
    return float(spread + 0.3 * torch.stack([first.mean(), second.mean()]).norm())
