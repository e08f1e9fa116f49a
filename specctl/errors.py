"""The error tree and the exit codes. Floor 1: knows nothing else of specctl.

    SpecctlError                2  could not
    |- UsageError               2  an option or argument is wrong
    |- InputError               2  a file or its content is wrong
    |  |- TargetError           2  the target model cannot be used
    |  |- DataError             2  conversations or prompts cannot be used
    |  |- ShardError            2  a shard folder is damaged or is not one
    |  |- UnsafeFile            2  a weights file names code to run
    |  `- SettingsChangedError  2  a run does not fit the folder it would continue
    |- NotSupportedError        2  known, and refused by name
    |- MachineError             2  disk, memory, device, process or network
    |- ContractError            1  ran well, and the answer is no
    |- UndecidedError           3  ran well, and cannot tell
    `- InterruptedRun         130  the user stopped it

Anything else that escapes is a bug in specctl: exit 70.
"""

from typing import Final

EXIT_YES: Final = 0
EXIT_NO: Final = 1
EXIT_COULD_NOT: Final = 2
EXIT_UNDECIDED: Final = 3
EXIT_BUG: Final = 70
EXIT_INTERRUPTED: Final = 130


class SpecctlError(Exception):
    """What a user can mend: one sentence, the place, and the next step.

    `message` states what was expected and what was found, lower case, without a full stop.
    """

    exit_code: int = EXIT_COULD_NOT

    def __init__(self, message: str, *, where: str | None = None, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.where = where
        self.hint = hint

    def __reduce__(self) -> tuple[object, ...]:
        # Errors cross process borders; the default would lose the keyword arguments.
        return (_rebuild, (type(self), self.message, self.where, self.hint))


def _rebuild(kind: type[SpecctlError], message: str, where: str | None, hint: str | None) -> SpecctlError:
    return kind(message, where=where, hint=hint)


class UsageError(SpecctlError):
    """An option or argument is wrong."""


class InputError(SpecctlError):
    """A file or its content is wrong."""


class TargetError(InputError):
    """The target model cannot be used."""


class DataError(InputError):
    """Conversations or prompts cannot be used."""


class ShardError(InputError):
    """A shard folder is damaged, or is not one."""


class UnsafeFile(InputError):
    """A weights file names code that loading it would run. Nothing of it was run."""


class SettingsChangedError(InputError):
    """A run does not fit the folder that it would continue."""


class NotSupportedError(SpecctlError):
    """Known, and refused by name before any work is done."""


class MachineError(SpecctlError):
    """Disk, memory, device, process or network failed."""


class ContractError(SpecctlError):
    """The run was fine and the answer is no."""

    exit_code = EXIT_NO


class UndecidedError(SpecctlError):
    """The run was fine and the evidence does not decide."""

    exit_code = EXIT_UNDECIDED


class InterruptedRun(SpecctlError):
    """The user stopped the run."""

    exit_code = EXIT_INTERRUPTED
