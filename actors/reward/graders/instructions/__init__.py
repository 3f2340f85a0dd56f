"""The graders `ifeval` and `ifbench`: whether a response follows the instructions that its row names.

Open grader.py first.
"""
