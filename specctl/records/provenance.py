"""Which software made a result."""

import platform
from importlib.metadata import PackageNotFoundError, version

from specctl import __version__


def versions() -> dict[str, str]:
    """Versions of specctl, Python and the libraries that decide a state's bits."""
    found = {"specctl": __version__, "python": platform.python_version()}
    for package in ("torch", "transformers", "pyarrow"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found
