"""Keeps transformers off stderr, which is ours. Knows nothing else."""

from __future__ import annotations


def quiet_transformers() -> None:
    """Turn off its log lines and progress bars."""
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
