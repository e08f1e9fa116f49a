"""specctl: hidden states, drafts, checks and acceptance length for speculative decoding."""

__version__ = "0.1.0"
