"""Files and models of the Hugging Face hub: one way to download them, one way to explain why that failed.

transformers and diffusers wrap the hub's error in an OSError, so that the reason is somewhere in its chain of causes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from marble_rl.errors import InputError, MarbleError

HUB = "https://huggingface.co"
TOKEN = "`hf auth login` or HF_TOKEN"
OF_THE_DEVICE = ("memory", "CUDA")
"""In a RuntimeError, that it is not the fault of a file."""
REACHABLE_TIMEOUT = 3.0
"""Seconds for `check_reachable`, where there is another way without the hub."""


@contextmanager
def explained(key: str, source: str, wanted: str, advice: str = "") -> Iterator[None]:
    """Turn an error while ``source`` is loaded into an `InputError` that says what to do.

    ``source`` is a hub id or a folder, ``wanted`` names what it should hold, and ``advice`` ends every message.
    """
    try:
        yield
    except (MarbleError, MemoryError):
        raise
    except ImportError as error:
        raise InputError(f"{key}: {source} needs a package that is not installed: {error}") from error
    except Exception as error:  # what a library raises for a broken file depends on what is broken
        if isinstance(error, RuntimeError) and any(word in str(error) for word in OF_THE_DEVICE):
            raise
        raise InputError(f"{key}: {_reason(error, source, wanted)}{advice and f'; {advice}'}") from error


def download(key: str, repository: str, name: str, advice: str = "") -> Path:
    """The path of a file of a repository, in the hub's cache after the first download."""
    with explained(key, repository, name, advice):
        from huggingface_hub import hf_hub_download

        return Path(hf_hub_download(repository, name))


def check_reachable() -> None:
    """Raise ConnectionError unless the hub answers within `REACHABLE_TIMEOUT`. huggingface_hub has no timeout for some
    of its requests."""
    from huggingface_hub import constants, get_session

    try:
        get_session().head(constants.ENDPOINT, timeout=REACHABLE_TIMEOUT)
    except Exception as error:  # from requests or httpx, depending on the version of huggingface_hub
        raise ConnectionError(f"{constants.ENDPOINT}: {error}") from error


def looks_local(source: str) -> bool:
    """Whether the text is a path rather than a hub id, `name` or `owner/name`: also where its first part is a folder
    here, such as a mistyped runs/name."""
    inside = source.count("/") == 1 and Path(source).parent.is_dir()
    return inside or Path(source).is_absolute() or source.startswith((".", "~")) or source.count("/") > 1


def _reason(error: BaseException, source: str, wanted: str) -> str:
    from huggingface_hub import constants
    from huggingface_hub.errors import (
        EntryNotFoundError,
        GatedRepoError,
        HfHubHTTPError,
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
    )

    page = f"{HUB}/{source}"
    first_line = str(error).strip().split("\n")[0]
    if not isinstance(error, (OSError, ValueError)):
        first_line = f"{type(error).__name__}: {first_line}"
    if Path(source).expanduser().exists():
        return f"{source} does not hold {wanted} ({first_line})"
    if looks_local(source):
        return f"no such folder or file: {source}; give {wanted}, or a hub id owner/name"
    causes = _causes(error)
    kinds = tuple(type(cause) for cause in causes)

    def among(*wanted_kinds: type[BaseException]) -> bool:
        return any(issubclass(kind, wanted_kinds) for kind in kinds)

    # The order matters: GatedRepoError is a RepositoryNotFoundError, LocalEntryNotFoundError an EntryNotFoundError.
    if among(GatedRepoError):
        return f"{source} is gated. Accept its licence at {page}, then give your token with {TOKEN}"
    if among(RepositoryNotFoundError):
        return (
            f"the hub has no {source!r}, or it is private. Check the id at {page}; "
            f"for a private one, give your token with {TOKEN}"
        )
    if among(LocalEntryNotFoundError, OfflineModeIsEnabled):
        why = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else f"the hub cannot be reached ({causes[-1]})"
        return (
            f"{wanted} of {source!r} is neither here nor in the hub's cache, and {why}. "
            f"Download {page} where there is a network (`hf download {source}`), and give the folder"
        )
    if among(EntryNotFoundError):
        return f"{page} does not hold {wanted} ({first_line})"
    if among(HfHubHTTPError):
        return f"the hub refused {page} ({first_line}). If it says 401, renew your token with {TOKEN}"
    return f"{page} does not hold {wanted} ({first_line})"


def _causes(error: BaseException) -> list[BaseException]:
    """The error and its causes, the error itself first."""
    chain: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and cause not in chain:
        chain.append(cause)
        cause = cause.__cause__ or cause.__context__
    return chain
