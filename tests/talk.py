"""A reporter for tests that ask what was said."""

from specctl.records.progress import SilentReporter


class Talk(SilentReporter):
    """Keeps what is said."""

    def __init__(self) -> None:
        self.warnings: list[str] = []
        self.notes: list[str] = []

    def warn(self, message: str) -> None:
        self.warnings.append(message)

    def note(self, message: str) -> None:
        self.notes.append(message)
