"""Fetches one file from the Hugging Face hub (extra `hf`) into a folder. Knows the hub's client and its errors only."""

from __future__ import annotations

import errno
import importlib
from pathlib import Path
from typing import Any

from millpond.errors import ModelFileError
from millpond.models.progress import Progress
from millpond.models.registry import HubFile


def hub_download(file: HubFile, folder: Path, progress: Progress) -> Path:
    """The file, fetched with the hub's own client (and its own progress bar and credentials).

    Raises ModelFileError when the extra is missing or the hub refuses, OSError(ENOSPC) when the disk is full.
    """
    client = _hub_client()
    progress.note(f"fetching {file}")
    try:
        fetched = client.hf_hub_download(repo_id=file.repo, filename=file.path, local_dir=str(folder))
    except (OSError, ValueError) as error:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ModelFileError(f"cannot fetch {file}: {reason}; check the name and the network") from error
    return Path(fetched)


def _hub_client() -> Any:
    try:
        return importlib.import_module("huggingface_hub")
    except ImportError:
        raise ModelFileError("hf: models need the extra 'hf'; run: pip install 'millpond[hf]'") from None
