"""The report of a run: a pure fold of its log into lines, metrics and a summary.

Open report.py first.
"""
