"""A name that is a folder, or a repository of the Hugging Face hub that is fetched or already cached."""

from pathlib import Path

from specctl.errors import InputError

PATTERNS = ["*.json", "*.safetensors", "*.bin"]


def local_folder(name: str, *, what: str) -> Path:
    """The path that `name` means; a hub id (owner/name) is fetched into the hub's cache.

    Raises InputError when it is neither a path nor a hub id, or cannot be fetched.
    """
    path = Path(name).expanduser()
    looks_like_id = name.count("/") == 1 and not name.startswith((".", "/", "~")) and not name.endswith("/")
    if path.exists() or not looks_like_id:
        return path
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=PATTERNS))
    except Exception as error:  # the hub's errors share no base class narrower than this
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise InputError(
            f"the {what} `{name}` is no local folder and could not be fetched from the hub: {reason}",
            hint="is the path right? A hub id has the form owner/name; a private one needs HF_TOKEN",
        ) from error
