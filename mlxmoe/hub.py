"""From what the user calls a model to a local folder: the built-in demo, a folder, or a hub id. Knows no MLX.

Downloads are huggingface-hub's own: cached, taken up again after a broken connection, and kept local by
`HF_HUB_OFFLINE=1`. It throws away a file that is not whole when the process ends; so files come one after the other
here, and an interrupted download loses one of them, not all.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from fnmatch import fnmatch
from importlib import resources
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, constants, snapshot_download
from huggingface_hub.errors import (
    DryRunError,
    GatedRepoError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils.tqdm import tqdm

from mlxmoe.errors import DownloadError, ModelNotFoundError, brief
from mlxmoe.memory.sizes import format_bytes

# Stage ("download", "load"), bytes done, bytes in all.
Progress = Callable[[str, int, int], None]

# What mlx-lm reads of a repository: no second copies in other formats.
PATTERNS = [
    "*.json", "model*.safetensors", "*.py", "tokenizer.model", "*.tiktoken", "*.txt", "*.jsonl", "*.jinja",
]  # fmt: skip
HEADERS_AT_A_TIME = 8  # of a checkpoint in many files: some have hundreds
HEADER_TIMEOUT_S = 10.0
DISK_MARGIN_BYTES = 2**30  # a disk filled to the brim stops more than this program

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def resolve(
    model: str | Path | None,
    revision: str | None = None,
    progress: Progress | None = None,
    *,
    download: bool = True,
) -> Path:
    """The local folder of `model`: None for the built-in demo, a folder's path, or a hub id (downloaded if need be).

    `revision`: a branch, tag or commit, for hub ids only. `download=False`: only what is on this machine already.
    Raises ModelNotFoundError or DownloadError.
    """
    if model is None:
        if revision is not None:
            raise ModelNotFoundError(f"revision={revision!r} is for hub ids, but the demo model is built in.")
        return demo_folder()
    if not isinstance(model, str | Path) or not str(model):
        raise ModelNotFoundError(f"A model is a folder or a hub id, not {model!r}.")
    try:
        folder = Path(model).expanduser()
        is_folder, exists = folder.is_dir(), folder.exists()
    except (OSError, ValueError, RuntimeError) as error:
        raise ModelNotFoundError(f"{model} cannot be looked up: {brief(error)}.") from error
    if is_folder:
        if revision is not None:
            raise ModelNotFoundError(f"revision={revision!r} is for hub ids, but {folder} is a local folder.")
        return folder.resolve()
    if exists:
        raise ModelNotFoundError(f"{folder} is a file. Give the model's folder, the one with config.json in it.")
    if isinstance(model, Path) or not _HUB_ID.fullmatch(model):
        raise ModelNotFoundError(
            f"There is no folder {folder}. Give a model's folder, a hub id (owner/name) such as "
            f"mlx-community/Qwen3-30B-A3B-4bit, or nothing for the built-in demo model."
        )
    return _download(model, revision, progress) if download else _find_cached(model, revision)


def demo_folder() -> Path:
    """The folder of the model that ships with the package."""
    return Path(str(resources.files("mlxmoe") / "demo"))


def cache_folder() -> Path:
    """Where huggingface-hub keeps downloads, or will: then the nearest folder above that is there."""
    cache = Path(constants.HF_HUB_CACHE)
    return next(folder for folder in (cache, *cache.parents) if folder.exists())


def _find_cached(repo: str, revision: str | None) -> Path:
    """The folder of an earlier download. Asks no network."""
    try:
        return Path(snapshot_download(repo, revision=revision, allow_patterns=PATTERNS, local_files_only=True))
    except (LocalEntryNotFoundError, HFValidationError) as error:
        raise ModelNotFoundError(
            f"{repo}{f' at revision {revision}' if revision else ''} was not downloaded to this machine, and nothing "
            f"is downloaded here. Give a local folder, or load the model once."
        ) from error


def find_cached(repo: str, revision: str | None = None) -> Path | None:
    """The folder of an earlier download, whole or not; None where there is none. Asks no network."""
    try:
        return _find_cached(repo, revision)
    except ModelNotFoundError:
        return None


def is_hub_id(model: str | Path) -> bool:
    """Whether `model` is written as a hub id and no such folder or file is there."""
    return isinstance(model, str) and _HUB_ID.fullmatch(model) is not None and not Path(model).exists()


def fetch_outline(repo: str, revision: str | None, folder: Path) -> dict[str, dict[str, dict[str, Any]]]:
    """Put a hub id's config.json (and code of its own) into `folder`, and return the headers of its weight files.

    Downloads no weight, and nothing into the cache: headers come by small range requests. No headers where the
    repository has no weights that mlx-lm would load. Raises ModelNotFoundError or DownloadError.
    """
    with _hub_errors(repo, revision):
        hub = HfApi()
        found = hub.model_info(repo, revision=revision, timeout=HEADER_TIMEOUT_S)
        names = [file.rfilename for file in found.siblings or ()]
        if "config.json" not in names:
            raise ModelNotFoundError(f"{repo} on the hub is no language model: it has no config.json.")
        snapshot_download(
            repo, revision=found.sha, allow_patterns=["config.json", "*.py"], local_dir=folder,
            tqdm_class=_silent_bar(None),
        )  # fmt: skip
        weights = sorted(name for name in names if fnmatch(name, "model*.safetensors"))
        with ThreadPoolExecutor(HEADERS_AT_A_TIME) as pool:
            headers = pool.map(
                lambda name: hub.parse_safetensors_file_metadata(repo, name, revision=found.sha), weights
            )
            return {
                name: {
                    tensor: {"dtype": info.dtype, "shape": info.shape, "data_offsets": list(info.data_offsets)}
                    for tensor, info in header.tensors.items()
                }
                for name, header in zip(weights, headers, strict=True)
            }


def _download(repo: str, revision: str | None, progress: Progress | None) -> Path:
    with _hub_errors(repo, revision):
        _refuse_full_disk(repo, revision)
        return Path(
            snapshot_download(repo, revision=revision, allow_patterns=PATTERNS, tqdm_class=_silent_bar(progress))
        )


@contextmanager
def _hub_errors(repo: str, revision: str | None) -> Iterator[None]:
    """Within this context, what goes wrong with the hub is an error of ours that says what to do."""
    what = f"{repo} at revision {revision}" if revision else repo
    try:
        yield
    except (GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError) as error:
        hint = "accept its licence on its page" if isinstance(error, GatedRepoError) else "check the spelling"
        raise ModelNotFoundError(
            f"The hub has no {what} for you. Please {hint}, and log in (`hf auth login`) if it is private."
        ) from error
    except (LocalEntryNotFoundError, OfflineModeIsEnabled) as error:
        offline = constants.HF_HUB_OFFLINE
        reason = "HF_HUB_OFFLINE is set" if offline else f"the hub ({constants.ENDPOINT}) cannot be reached"
        raise DownloadError(
            f"{what} is not (or not wholly) on this machine, and {reason}. Files that are here are kept: "
            f"run it again when online, or give a local folder."
        ) from error
    except (DownloadError, ModelNotFoundError):
        raise
    except HFValidationError as error:
        raise ModelNotFoundError(f"{repo} is neither a folder nor a hub id: {error}") from error
    except Exception as error:  # the network's and the disk's many ways to fail, through several libraries
        raise DownloadError(
            f"Downloading {what} stopped: {brief(error)}. Files that are whole are kept: run it again."
        ) from error


def _refuse_full_disk(repo: str, revision: str | None) -> None:
    """Compare what is still to be downloaded with the free disk. Silent when the hub cannot be asked."""
    if constants.HF_HUB_OFFLINE:
        return
    try:
        files = snapshot_download(
            repo, revision=revision, allow_patterns=PATTERNS, dry_run=True, tqdm_class=_silent_bar(None)
        )
    except DryRunError:
        return  # the download itself says what is wrong, or uses what is cached
    wanted = sum(file.file_size or 0 for file in files if file.will_download)
    present = cache_folder()
    free = shutil.disk_usage(present).free
    if wanted and wanted + DISK_MARGIN_BYTES > free:
        raise DownloadError(
            f"{repo} needs {format_bytes(wanted)} more on disk, but {present} has {format_bytes(free)} free "
            f"(and {format_bytes(DISK_MARGIN_BYTES)} should stay so). Free some, or set HF_HOME to a larger disk."
        )


def _silent_bar(progress: Progress | None) -> type[Any]:
    """A progress bar class, as huggingface-hub wants one, that draws nothing and reports bytes to `progress`."""

    class SilentBar(tqdm):
        def __init__(self, *args: Any, **options: Any) -> None:
            # Of the bars that a download makes, this one counts bytes that are on disk.
            self._counts = options.get("name") == "huggingface_hub.snapshot_download"
            self._done = 0
            super().__init__(*args, **{**options, "disable": True})  # type: ignore[no-untyped-call]

        def update(self, n: float | None = 1) -> None:
            self._done += int(n or 0)
            if self._counts and progress is not None:
                progress("download", self._done, int(self.total or 0))

    return SilentBar
