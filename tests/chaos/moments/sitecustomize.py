"""Installs kill points in the processes of a run. Python imports it because its folder is on their PYTHONPATH.

Python imports only the first sitecustomize.py on its path. This one therefore runs a later one, such as that of
tests/sglang/shim.
"""

import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType

LAST = {  # module that is imported late, by kind of process; patched modules are imported by then, or with it
    "actors.trainer.commands": "trainer",
    "actors.tiny_engine.http.sessions": "engine",
    "sglang.srt.managers.scheduler_components.weight_updater": "engine",
    "actors.rollout.engines.weights.receiving": "rollout",
    "runtime.node.copying": "daemon",  # if PHYSARUM_PROCESS of the command is "daemon"
}


class Finder(importlib.abc.MetaPathFinder):
    """Installs the kill points when a certain module is loaded."""

    def __init__(self, kind: str) -> None:
        self._kind = kind

    def find_spec(
        self, name: str, path: object, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if LAST.get(name) != self._kind:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        assert spec is not None
        assert spec.loader is not None
        load = spec.loader.exec_module

        def load_with_moments(module: ModuleType) -> None:
            load(module)
            from tests.chaos import session_moments

            session_moments.INSTALLS[name]()

        spec.loader.exec_module = load_with_moments  # type: ignore[method-assign]
        return spec


process = os.environ.get("PHYSARUM_PROCESS", "").partition(".")[0]
if "PHYSARUM_TEST_MOMENTS" in os.environ and process in LAST.values():
    sys.meta_path.insert(0, Finder(process))

elsewhere = [place for place in sys.path if Path(place) != Path(__file__).parent]
behind = importlib.machinery.PathFinder.find_spec("sitecustomize", elsewhere)
if behind is not None and behind.loader is not None:
    behind.loader.exec_module(importlib.util.module_from_spec(behind))
