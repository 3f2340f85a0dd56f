"""Installs kill points in the processes of a run, and has its trainer wait for the test.

Python imports it because its folder is on their PYTHONPATH. Python imports only the first sitecustomize.py on its path.
This one therefore runs a later one, such as that of tests/sglang/shim.
"""

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType

may_be_forked = True  # what this installs looks at the process when it is called
INSTALLS = {  # functions of tests/chaos/weight_moments.py, by the module that they wait for
    "runtime.bus.bus": "install_calls",
    "actors.trainer.commands": "install_rank",
    "actors.trainer.lora.published": "install_exports",
    "aiohttp.web": "install_engine",
    "sglang.srt.managers.scheduler_components.weight_updater": "install_sglang",
    "actors.rollout.sglang.client": "install_rollout",
    "runtime.node.copying": "install_daemon",  # strikes if PHYSARUM_PROCESS of the command is "daemon"
}


class Finder(importlib.abc.MetaPathFinder):
    """Installs kill points when certain modules are loaded: a process imports none of them for the tests."""

    def __init__(self, modules: dict[str, str], module_of_tests: str) -> None:
        self._modules = dict(modules)  # names of functions, by module
        self._module_of_tests = module_of_tests  # in which the functions are

    def find_spec(
        self, name: str, path: object, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        install = self._modules.pop(name, None)
        if install is None:
            return None
        spec = importlib.util.find_spec(name)
        assert spec is not None
        assert spec.loader is not None
        load = spec.loader.exec_module

        def load_with_moments(module: ModuleType) -> None:
            load(module)
            getattr(importlib.import_module(self._module_of_tests), install)()

        spec.loader.exec_module = load_with_moments  # type: ignore[method-assign]
        return spec


if "PHYSARUM_TEST_MOMENTS" in os.environ:
    sys.meta_path.insert(0, Finder(INSTALLS, "tests.chaos.weight_moments"))
if "PHYSARUM_TEST_PACE" in os.environ:
    sys.meta_path.insert(0, Finder({"actors.trainer.data.feed": "install"}, "tests.chaos.pace"))

elsewhere = [place for place in sys.path if Path(place) != Path(__file__).parent]
behind = importlib.machinery.PathFinder.find_spec("sitecustomize", elsewhere)
if behind is not None and behind.loader is not None:
    behind.loader.exec_module(importlib.util.module_from_spec(behind))
