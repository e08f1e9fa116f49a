"""Judges specctl by a real vLLM, and writes docs/conformance.md. Run by `make conformance`."""
