"""An exchange that fails says why, with torch's text, and the run is saved. The texts of gloo are those that
torch 2.13 raises when they are provoked, the texts of NCCL those that its users report."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from marble_rl.distributed.failed_exchange import explained_exchange
from marble_rl.distributed.torchrun import DistributedWorld
from marble_rl.errors import ExchangeFailed, OutOfMemory, RankLost, RunStopped, StorageFailed
from marble_rl.types import RewardTable
from runs import Outcome, lora_bytes, marble, metrics, train, write_config

GLOO = "[/__w/pytorch/pytorch/third_party/gloo/gloo/transport/tcp"
TIMED_OUT = f"{GLOO}/unbound_buffer.cc:78] Timed out waiting 3000ms for recv operation to complete"
CLOSED = (
    f"{GLOO}/pair.cc:553] Connection closed by peer [127.0.0.1]:11493. This is typically caused by a remote worker "
    "crashing. Check the logs of the remote worker before reporting an error. GLHF! 🏖️"
)
NCCL = (
    "NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.cpp:77, unhandled {} error (run with "
    "NCCL_DEBUG=INFO for details), NCCL version 2.26.2\n{}\nLast error:\n{}"
)
SYSTEM = "ncclSystemError: System call (e.g. socket, malloc) or external library call failed or device error. "
FULL = NCCL.format(
    "system",
    SYSTEM,
    "Error while creating shared memory segment /dev/shm/nccl-WU88OE (size 9637888), error: No space left on device "
    "(28)",
)
NO_MEMORY = NCCL.format(
    "cuda", "ncclUnhandledCudaError: Call to CUDA function failed.", "Cuda failure 2 'out of memory'"
)
REFUSED = NCCL.format("system", SYSTEM, "Call to ibv_modify_qp failed with error Invalid argument")
UNPINNED = NCCL.format("system", SYSTEM, "Call to ibv_reg_mr_iova2 failed with error Cannot allocate memory")
GONE = NCCL.format(
    "remote", "ncclRemoteError: A call failed possibly due to a network error or a remote process exiting.", "socket"
)
WORK = "WorkNCCL(SeqNum=1, OpType=ALLREDUCE, NumelIn=1, NumelOut=1, Timeout(ms)=600000)"

KINDS: list[tuple[type[RunStopped], Exception]] = [
    (RankLost, RuntimeError(TIMED_OUT)),
    (RankLost, RuntimeError("Application timeout caused pair closure")),
    (RankLost, dist.DistStoreError("wait timeout after 3000ms, keys: /default_pg/0//key")),
    (
        RankLost,
        dist.DistNetworkError("The client socket has timed out after 2000ms while trying to connect to (a, 1)."),
    ),
    (RankLost, dist.DistNetworkError("Failed to recv, got 0 bytes. Connection was likely closed.")),
    (RankLost, dist.DistBackendError(f"[Rank 0] Watchdog caught collective operation timeout: {WORK} ran for 600081")),
    (RankLost, RuntimeError(CLOSED)),
    (RankLost, ConnectionResetError(104, "Connection reset by peer")),
    (RankLost, dist.DistBackendError(GONE)),
    (ExchangeFailed, dist.DistBackendError(UNPINNED)),
    (StorageFailed, dist.DistBackendError(FULL)),
    (StorageFailed, OSError(28, "No space left on device")),
    (OutOfMemory, dist.DistBackendError(NO_MEMORY)),
    (OutOfMemory, torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")),
    (OutOfMemory, MemoryError()),
    (OutOfMemory, RuntimeError("[enforce fail at alloc_cpu.cpp:121] DefaultCPUAllocator: can't allocate memory")),
    (ExchangeFailed, dist.DistBackendError(REFUSED)),
    (ExchangeFailed, dist.DistBackendError(f"{WORK} failed: ncclInvalidUsage: Duplicate GPU detected")),
]


@pytest.mark.parametrize(("kind", "error"), KINDS)
def test_only_timeouts_and_closed_connections_are_a_lost_rank(kind: type[RunStopped], error: Exception) -> None:
    explained = explained_exchange(error, 7)
    assert type(explained) is kind
    assert str(explained).endswith(str(error) or "MemoryError")
    assert ("another rank of this run died, or exceeded the timeout of 7 s" in str(explained)) == (kind is RankLost)
    assert explained.exit_code == 3


def test_a_long_stack_of_frames_does_not_push_the_advice_out() -> None:
    frames = "\n".join(f"frame #{i}: somewhere" for i in range(50))
    message = str(explained_exchange(RuntimeError(f"{FULL}\n{frames}"), 7))
    assert "docker run --shm-size" in message
    assert FULL in message


def test_an_interface_that_is_not_there(launched: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Provoked, not stubbed."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nowhere0")
    with pytest.raises(ExchangeFailed, match=r"GLOO_SOCKET_IFNAME(.|\n)*Unable to find address for: nowhere0"):
        DistributedWorld()


# Through the whole command, on a single rank whose exchanges are real until the one that fails

CASES = {
    "time-out": (RuntimeError(TIMED_OUT), "another rank of this run died, or exceeded the timeout of 3600 s"),
    "closed connection": (RuntimeError(CLOSED), "Look for its own message"),
    "full /dev/shm": (dist.DistBackendError(FULL), "make it larger (docker run --shm-size 16g"),
    "no memory on the GPU": (dist.DistBackendError(NO_MEMORY), "a smaller trainer.micro_batch"),
    "no memory on the host": (MemoryError("while pickling"), "on the host fewer ranks"),
    "NCCL": (dist.DistBackendError(REFUSED), "NCCL_DEBUG=INFO in the environment"),
}


@pytest.fixture
def command(world: DistributedWorld, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Outcome]:
    """`marble train` in that world."""
    monkeypatch.setattr("marble_rl.cli.train.join", lambda: world)
    return lambda *arguments: marble("train", *arguments)


@pytest.fixture(scope="module")
def config(tiny_sd3: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    trainer = {"steps": 4, "save_every": 100, "micro_batch": 16, "eval_every": 3}
    return write_config(tmp_path_factory.mktemp("config") / "config.yaml", tiny_sd3, trainer=trainer)


@pytest.fixture(scope="module")
def calm(config: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("calm") / "run"
    train(config, run)
    return run


def scores_of_a_rollout(value: Any) -> bool:
    return isinstance(value, RewardTable) and len(value.values) == 16


def scores_of_an_evaluation(value: Any) -> bool:
    return isinstance(value, RewardTable) and len(value.values) != 16


def counts_of_the_log(value: Any) -> bool:
    return isinstance(value, dict) and "bright" in value


IN_A_ROLLOUT = (scores_of_a_rollout, 1, 2)


@pytest.mark.parametrize(
    ("what", "at", "saved", "error", "advice"),
    [
        *((*IN_A_ROLLOUT, *case) for case in CASES.values()),
        (scores_of_an_evaluation, 0, 3, *CASES["time-out"]),
        (counts_of_the_log, 2, 3, *CASES["full /dev/shm"]),
    ],
    ids=[*CASES, "in an evaluation", "in the log"],
)
def test_a_failed_exchange_has_its_own_message_and_all_is_saved(
    command: Callable[..., Outcome],
    config: Path,
    calm: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    what: Callable[[Any], bool],
    at: int,
    saved: int,
    error: Exception,
    advice: str,
) -> None:
    """The exchange of this kind after ``at`` others fails, when ``saved`` updates are done. None follows."""
    exchange, seen, run = dist.all_gather_object, 0, tmp_path / "run"

    def failing(values: list[Any], value: Any, **options: Any) -> None:
        nonlocal seen
        seen += what(value)
        if seen <= at:
            return exchange(values, value, **options)
        monkeypatch.setattr(dist, "all_reduce", lambda *_, **__: pytest.fail("an exchange after one that failed"))
        raise error

    monkeypatch.setattr(dist, "all_gather_object", failing)
    outcome = command(config, "--out", run)
    assert outcome.code == 3, outcome.err
    assert advice in outcome.err
    assert f"The error: {type(error).__name__}: {error}\n" in outcome.err
    assert f"Step {saved} is saved. Continue with: " in outcome.err
    assert ("another rank of this run died" in outcome.err) == (str(error) in (TIMED_OUT, CLOSED))
    assert len(metrics(run)) == saved
    monkeypatch.undo()
    train(config, run, "--resume")
    assert lora_bytes(run) == lora_bytes(calm)
    assert [line["loss/policy"] for line in metrics(run)] == [line["loss/policy"] for line in metrics(calm)]


@pytest.mark.parametrize(("error", "advice"), CASES.values(), ids=list(CASES))
def test_the_first_exchange_is_made_before_a_model_is_loaded(
    command: Callable[..., Outcome],
    config: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    error: Exception,
    advice: str,
) -> None:
    exchange = dist.all_reduce

    def failing(tensor: torch.Tensor, *options: Any, **named: Any) -> Any:
        if "group" not in named:  # the default group, which exchanges gradients on the device that trains
            raise error
        return exchange(tensor, *options, **named)

    monkeypatch.setattr(dist, "all_reduce", failing)
    outcome = command(config, "--out", tmp_path / "run")
    assert outcome.code == 3
    assert "stopped: at the start, before any model was loaded, on cpu: " in outcome.err
    assert advice in outcome.err
    assert str(error) in outcome.err
    assert not (tmp_path / "run").exists()


def test_an_exchange_must_give_the_right_sum(world: DistributedWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    world.check_exchange(torch.device("cpu"))
    with_first_exchange(monkeypatch, lambda tensor: SimpleNamespace(is_completed=lambda: True, wait=tensor.zero_))
    with pytest.raises(ExchangeFailed, match=r"the sum of 1 ones is 0. Try NCCL_P2P_DISABLE=1"):
        world.check_exchange(torch.device("cpu"))


def test_an_exchange_that_hangs_at_the_start_is_given_up(
    world: DistributedWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("marble_rl.distributed.torchrun.START_TIMEOUT", 0.05)
    with_first_exchange(monkeypatch, lambda tensor: SimpleNamespace(is_completed=lambda: False))
    with pytest.raises(ExchangeFailed, match=r"at the start, .*NCCL_DEBUG=INFO.*no result within 0.05 s"):
        world.check_exchange(torch.device("cpu"))


def with_first_exchange(monkeypatch: pytest.MonkeyPatch, answer: Callable[[torch.Tensor], object]) -> None:
    """Another answer in the default group, which exchanges gradients on the device that trains."""
    exchange = dist.all_reduce

    def other(tensor: torch.Tensor, *options: Any, **named: Any) -> Any:
        return exchange(tensor, *options, **named) if "group" in named else answer(tensor)

    monkeypatch.setattr(dist, "all_reduce", other)
