"""In every Python process that has this folder on its PYTHONPATH: one of a run gets its moments to die at."""

import importlib.abc
import importlib.machinery
import os
import sys
from types import ModuleType

LAST = {  # module that is imported late, by kind of process; what gets moments is there then, or is imported with them
    "trainer": "actors.trainer.commands",
    "engine": "actors.rollout.embedded.http.sessions",
    "rollout": "actors.rollout.engines.weights.receiving",
    "agent": "runtime.agent.copying",  # where the command's environment names it so: it is the command
}


class Finder(importlib.abc.MetaPathFinder):
    """Finds a module, and has the moments put in when it is loaded."""

    def __init__(self, kind: str) -> None:
        self._kind = kind

    def find_spec(
        self, name: str, path: object, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != LAST[self._kind]:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        assert spec is not None
        assert spec.loader is not None
        load = spec.loader.exec_module

        def load_with_moments(module: ModuleType) -> None:
            load(module)
            from tests.chaos import session_moments

            session_moments.INSTALLS[self._kind]()

        spec.loader.exec_module = load_with_moments  # type: ignore[method-assign]
        return spec


process = os.environ.get("PHYSARUM_PROCESS", "").partition(".")[0]
if "PHYSARUM_TEST_MOMENTS" in os.environ and process in LAST:
    sys.meta_path.insert(0, Finder(process))
