"""Taking turns with engines that have the same memory.

Start with turns.py, which leads them; states.py says which phase follows which, and what is done when somebody dies.
"""
