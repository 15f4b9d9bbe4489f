"""What can go wrong, one class for each exit code."""


class PatchsetError(Exception):
    """A failure the user can act on: one message, and the next command if there is one."""

    exit_code = 1

    def __init__(self, message: str, next_step: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.next_step = next_step


class Drift(PatchsetError):
    """The tree holds content that no subset of the patches over the pin gives."""

    exit_code = 1


class Conflict(PatchsetError):
    """A change cannot be told apart from another patch's, and does not say that it needs it."""

    exit_code = 1


class Usage(PatchsetError):
    """The request makes no sense: no such folder, not SGLang, unknown patch or pin."""

    exit_code = 2


class UnsafeTree(PatchsetError):
    """Writing now could destroy the user's work."""

    exit_code = 3


class EnvironmentFailure(PatchsetError):
    """The machine refuses: disk full, read-only, locked, download not as hashed."""

    exit_code = 4


class DamagedPatchSet(PatchsetError):
    """The patch set itself is wrong: a patch, the series, the manifest or the pin."""

    exit_code = 5
