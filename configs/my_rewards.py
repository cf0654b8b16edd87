"""Rewards of your own. A config names one by its import path: {name: mine, type: "my_rewards:mine"}."""

import numpy as np


def mine(images, prompts, **meta):
    """Takes a list of uint8 images [H, W, 3] and their prompts. Returns one number for each image; higher is better.

    None where an image cannot be judged. meta["metadata"] holds what a prompt file says about each prompt, and
    `params` of the config arrive as keyword arguments. `marble rewards check CONFIG` tries it before a training does.
    """
    return [float(np.asarray(image, dtype=float).std()) for image in images]  # contrast: replace it by your own


# A reward with a model: load it once, and say what it applies to.
#
# from marble_rl.rewards.core.base import RewardBase
#
# class Mine(RewardBase):
#     def load(self, device):
#         self.model = ...
#
#     def applies_to(self, prompt):
#         return "photo" in prompt.text
#
#     def score(self, batch):
#         return [...]  # one number for each of batch.images, with batch.prompts beside them
