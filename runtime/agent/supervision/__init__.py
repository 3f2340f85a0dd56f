"""Child processes: started, kept running, stopped, and none left behind.

Open supervisor.py first.
"""
