"""Observers of a run: they read its log as viewers, and the run does not notice them.

Open page.py first: the page of `bin/watch RUN --page`. What it shows is folded in actors/observer/observed.py.
terminal.py is the view of `bin/watch RUN` in a terminal.
"""
