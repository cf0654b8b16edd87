"""What a failed exchange between ranks means.

torch raises RuntimeErrors for all of it, so the text decides. The texts are those of gloo (`Connection closed by peer`,
`Timed out waiting 3000ms for recv operation to complete`, `Application timeout caused pair closure`), of torch's store
(`wait timeout after`, `The client socket has timed out`) and of NCCL, ending with its last error (`ncclRemoteError`,
`Error while creating shared memory segment /dev/shm/nccl-..., error: No space left on device (28)`,
`Cuda failure 2 'out of memory'`).
"""

from __future__ import annotations

import re

import torch

from marble_rl.errors import ExchangeFailed, OutOfMemory, RankLost, RunStopped, StorageFailed, described

TIMEOUT = "MARBLE_TIMEOUT"
_PINNED = re.compile(r"ibv_\w+ failed.*cannot allocate memory", re.I | re.S)
_FULL = re.compile("no space left on device", re.I)
_OUT_OF_MEMORY = re.compile("out of memory|not enough memory|(can't|cannot) allocate memory|bad_alloc", re.I)
_LOST = re.compile(
    r"timed? ?out(?!\()"  # WorkNCCL(..., Timeout(ms)=600000) is in the text of any NCCL error
    r"|connection (was likely )?(closed|reset|refused)|closed by (remote )?peer|broken pipe|ncclRemoteError",
    re.I,
)


def explained_exchange(error: Exception, timeout: float) -> RunStopped:
    """The error to raise in place of what torch raised: what to do, then its text. A long one is cut in messages;
    train.log has all of it."""
    text, whole = described(error), str(error)
    if _PINNED.search(whole):
        return ExchangeFailed(
            "the network card may not lock enough memory for an exchange between ranks. Raise the limit: ulimit -l "
            f"unlimited, docker run --ulimit memlock=-1; then continue with --resume. The error: {text}"
        )
    if _FULL.search(whole):
        return StorageFailed(
            "no space left in an exchange between ranks. NCCL keeps buffers of all ranks of a machine in /dev/shm: "
            "make it larger (docker run --shm-size 16g, or --ipc host; in Kubernetes an emptyDir of medium Memory "
            f"mounted there), then continue with --resume. The error: {text}"
        )
    if isinstance(error, MemoryError | torch.OutOfMemoryError) or _OUT_OF_MEMORY.search(whole):
        return OutOfMemory(
            "out of memory in an exchange between ranks. NCCL's buffers on a GPU are not part of what torch reserved "
            "there. What helps: a smaller trainer.micro_batch or rollout.batch_size, a smaller lora.rank, fewer "
            f"rewards; on the host fewer ranks. Then continue with --resume. The error: {text}"
        )
    if _LOST.search(whole):
        return RankLost(
            f"another rank of this run died, or exceeded the timeout of {timeout:g} s ({TIMEOUT}). Look for its own "
            f"message; continue with --resume. The error: {text}"
        )
    return ExchangeFailed(
        "an exchange between ranks failed. NCCL_DEBUG=INFO in the environment shows what NCCL was doing. Check that "
        "every rank has a GPU of its own, that torch and the GPU's driver are the same on all machines, and that "
        "NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME, if set, name the network between them; then continue with "
        f"--resume. The error: {text}"
    )
