"""Applies all rules to a topology."""

from runtime.settings.halves import half_problems
from runtime.settings.reading.config import Problem
from runtime.settings.rules.gpus import fit_problems, gpu_problems
from runtime.settings.rules.lora import lora_problems
from runtime.settings.rules.recipe import recipe_problems
from runtime.settings.rules.topology import topology_problems
from runtime.settings.rules.weights import transport_problems
from runtime.settings.topology import Topology


def validate(topology: Topology) -> list[Problem]:
    """Apply every rule and return all problems, not only the first."""
    rules = (recipe_problems, topology_problems, lora_problems, transport_problems, gpu_problems, half_problems)
    problems = [problem for rule in rules for problem in rule(topology)]
    if not any(problem.key.endswith("gpus") for problem in problems):  # the GPU lists can be parsed
        problems += fit_problems(topology)
    return problems
