"""How rewards get their images: all of them score the same ones, so none may change them."""

from __future__ import annotations

import re
import warnings
import zlib
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from marble_rl.errors import described, text_of
from marble_rl.rewards.core.base import Images, RewardBatch, Traits
from marble_rl.rewards.core.retries import AttemptFailed


class ImagesWritten(AttemptFailed):
    """A reward wrote to images that other rewards score too."""

    final = True


READ_ONLY = re.compile(r"destination is read-only|(?i:array|buffer)\b.*\bread-?only|WRITEABLE flag")
"""In the messages of numpy, OpenCV and Cython when code writes to a read-only array."""
FIX = "Change a copy (`images.copy()`), or declare `traits = Traits(writes_images=True)`, and each call gets its own"
WRITES = f"it writes to its images, which all rewards share, so they are read-only. {FIX}"
CHANGED = (
    "the images, which all rewards share, changed while it scored them: it, or another reward at the same time, writes "
    f"to them past the read-only flag, as in-place operations on `torch.from_numpy(images)` do. {FIX}"
)

warnings.filterwarnings("ignore", "The given NumPy array is not writable", UserWarning)  # the checksum does better


@contextmanager
def handed(batch: RewardBatch, traits: Traits) -> Iterator[RewardBatch]:
    """The batch as a reward with these traits gets it: a copy where it declares `writes_images`, else a read-only view.

    Not everything heeds the flag: a tensor of `torch.from_numpy` does not. A checksum finds out whether the images are
    still the same."""
    if traits.writes_images:
        yield RewardBatch(batch.images.copy(), batch.prompts)
        return
    images, before = batch.images.view(), _checksum(batch.images)
    images.flags.writeable = False
    try:
        yield RewardBatch(images, batch.prompts)
    except Exception as error:
        if READ_ONLY.search(text_of(error)):
            raise ImagesWritten(f"{WRITES} ({described(error)})") from error
        raise
    finally:
        # Even where the reward raised: nothing else may be computed from these images.
        if _checksum(batch.images) != before:
            raise ImagesWritten(CHANGED)


def _checksum(images: Images) -> int:
    return zlib.crc32(np.ascontiguousarray(images).data)
