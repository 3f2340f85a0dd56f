"""Compares mathematical answers: the graders `math` and `deepscaler`.

Open grader.py first.
"""
