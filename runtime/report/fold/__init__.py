"""What the log of a run says, folded without a clock or a file: the daemon, the observers and commands read it.

Open account.py first: where the time went, and the spans of groups, steps and processes.
"""
