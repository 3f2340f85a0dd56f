"""Exit codes of this project's processes and commands. No other module defines any."""

from typing import Final

EXIT_OK: Final = 0
EXIT_FAILED: Final = 1  # may be retried
EXIT_INPUT_ERROR: Final = 2  # the input is wrong; a restart does not help
EXIT_FENCED: Final = 118  # another process has taken over its role; not a code that a user's function may end with
EXIT_ORPHANED: Final = 5  # of a grader's keeper process: its actor is gone
EXIT_NO_SPACE: Final = 6  # the disk is full; the run continues once there is space
EXIT_TOO_MANY_PROCESSES: Final = 117  # of a grader's keeper process: it killed the grader for too many processes
EXIT_NOT_STARTED: Final = 127
EXIT_INTERRUPTED: Final = 130  # by Ctrl-C: 128 + signal number
