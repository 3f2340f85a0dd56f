"""What the exit code of one of our processes and commands says: the only table of them."""

from typing import Final

EXIT_OK: Final = 0
EXIT_FAILED: Final = 1  # may be tried again
EXIT_INPUT_ERROR: Final = 2  # it met input that a restart will not mend
EXIT_FENCED: Final = 3  # another process has taken over its role
EXIT_NO_HELLO: Final = 4  # of a grader process: its actor never said what to grade with
EXIT_ORPHANED: Final = 5  # of a grader's keeper: its actor is gone
EXIT_NO_SPACE: Final = 6  # the disk is full: it continues once there is room
EXIT_TOO_MANY_PROCESSES: Final = 117  # of a grader's keeper, which killed the grader for it
EXIT_NOT_STARTED: Final = 127
EXIT_INTERRUPTED: Final = 130  # by Ctrl-C: 128 and the signal's number
