"""What the exit code of one of our processes and commands says: the only table of them."""

from typing import Final

EXIT_OK: Final = 0
EXIT_FAILED: Final = 1  # may be tried again
EXIT_INPUT_ERROR: Final = 2  # it met input that a restart will not mend
EXIT_FENCED: Final = 3  # another process has taken over its role
EXIT_NOT_STARTED: Final = 127
EXIT_INTERRUPTED: Final = 130  # by Ctrl-C: 128 and the signal's number
