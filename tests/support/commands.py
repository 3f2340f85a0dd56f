"""Commands of bin/ called in this process: a start of the interpreter and its imports cost more than most of them."""

import io
import subprocess
import sys
from collections.abc import Callable
from contextlib import chdir, redirect_stderr, redirect_stdout
from pathlib import Path

import structlog

ROOT = Path(__file__).parents[2]
SCRIPTS = sorted(  # of bin/ that stand for a verb
    path.name
    for path in (ROOT / "bin").iterdir()
    if path.is_file() and not path.suffix and path.name not in ("physarum", "setup", "test")
)
USERS_FILES = "physarum_plugin_"  # begins the names of modules that settings name by file


def called(main: Callable[[list[str]], int], *arguments: object, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """Call a command in this thread, which must be the main one if the command obeys signals.

    What the command leaves in a process ends here as it would with one: the working directory, settings of logs, and
    modules of users' files, which the next call imports again.

    Args:
        main: of the command, such as `bin.ledger.main`.
        arguments: as text.
        cwd: working directory of the call.
    """
    command = [str(argument) for argument in arguments]
    out, err = io.StringIO(), io.StringIO()
    logs, before = structlog.get_config(), set(sys.modules)
    try:
        with chdir(cwd), redirect_stdout(out), redirect_stderr(err):
            code = main(command)
    except SystemExit as end:  # of argparse
        code = end.code
    finally:
        structlog.configure(**logs)
        for name in set(sys.modules) - before:
            if name.startswith(USERS_FILES):
                del sys.modules[name]
    assert isinstance(code, int), code
    return subprocess.CompletedProcess(command, code, out.getvalue(), err.getvalue())
