"""The wire format: scores keep every bit, anything else than the format is refused."""

from __future__ import annotations

import json

import numpy as np
import pytest

from marble_rl.rewards.remote.wire import Malformed, decode_batch, decode_scores


def test_awkward_floats_survive() -> None:
    values = [0.1, 1 / 3, -0.0, 5e-324, 1.7976931348623157e308, float(np.float32(0.1)), -1e-17]
    values += np.random.default_rng(0).integers(0, 2**62, 1000).view(np.float64).tolist()
    reply = json.dumps({"scores": values}).encode()
    assert np.array(decode_scores(reply, len(values))).tobytes() == np.array(values).tobytes()


def test_decoding_refuses_other_shapes() -> None:
    for shape in ([2, 4, 4], [2, 4, 4, 1], [2, -4, -4, 3], [True, 4, 4, 3], "2443", None):
        with pytest.raises(Malformed):
            decode_batch(bytearray(json.dumps({"shape": shape, "prompts": []}).encode() + b"\n"), 10)
