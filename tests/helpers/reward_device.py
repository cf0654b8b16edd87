"""The device that tests of reward models load them on: the CPU, or the one that the environment names.
invariant/test_accelerator.py runs these tests once more on the simulated accelerator."""

from __future__ import annotations

import importlib
import os

import torch

VARIABLE = "MARBLE_TEST_DEVICE"

if os.environ.get(VARIABLE) == "sim":
    importlib.import_module("simulated")
DEVICE = torch.device(os.environ.get(VARIABLE, "cpu"))
