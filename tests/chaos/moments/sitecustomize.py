"""In every Python process that has this folder on its PYTHONPATH: a trainer's rank gets its moments to die at."""

import importlib.abc
import importlib.machinery
import os
import sys
from types import ModuleType

LAST = "actors.trainer.commands"  # that a rank imports of the trainer; then all of it is there


class Finder(importlib.abc.MetaPathFinder):
    """Finds the trainer's last module, and has the moments put in when it is loaded."""

    def find_spec(
        self, name: str, path: object, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != LAST:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        assert spec is not None
        assert spec.loader is not None
        load = spec.loader.exec_module

        def load_with_moments(module: ModuleType) -> None:
            load(module)
            from tests.chaos import rank_moments

            rank_moments.install()

        spec.loader.exec_module = load_with_moments  # type: ignore[method-assign]
        return spec


if "PHYSARUM_TEST_MOMENTS" in os.environ and "RANK" in os.environ:
    sys.meta_path.insert(0, Finder())
