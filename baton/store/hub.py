"""Download a model from the Hugging Face hub into its usual cache. No conversion here."""

from pathlib import Path

from baton.store.disk import FreeSpace, require_space
from baton.store.errors import StoreError

_WANTED = ("*.json", "*.jinja", "model*.safetensors")
_TIMEOUT_S = 10.0


def download(hub_id: str, free: FreeSpace) -> Path:
    """The local directory of a hub model; huggingface_hub shows its own progress."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    try:
        _check_space(hub_id, free)
        path = snapshot_download(hub_id, allow_patterns=list(_WANTED), etag_timeout=_TIMEOUT_S)
    except GatedRepoError as error:
        raise StoreError(
            f"{hub_id} asks for its licence to be accepted; do so on its page, then log in with "
            "`hf auth login`."
        ) from error
    except RepositoryNotFoundError as error:
        raise StoreError(
            f"The hub has no model {hub_id} that you may read; check the name, or log in with "
            "`hf auth login` if it is private."
        ) from error
    except StoreError:
        raise
    except Exception as error:  # network faults come as errors of several HTTP libraries
        raise StoreError(
            f"{hub_id} could not be downloaded ({_first_line(error)}); check the internet "
            "connection, or download it elsewhere and give the path of its directory."
        ) from error
    return Path(path)


def _check_space(hub_id: str, free: FreeSpace) -> None:
    from fnmatch import fnmatch

    from huggingface_hub import HfApi
    from huggingface_hub.constants import HF_HUB_CACHE

    info = HfApi().model_info(hub_id, files_metadata=True, timeout=_TIMEOUT_S)
    sizes = (
        file.size or 0
        for file in info.siblings or ()
        if any(fnmatch(file.rfilename, pattern) for pattern in _WANTED)
    )
    cache = Path(HF_HUB_CACHE)
    cache.mkdir(parents=True, exist_ok=True)
    require_space(sum(sizes), cache, free)


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(".") if lines else type(error).__name__
