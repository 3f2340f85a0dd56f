"""What programs outside a run need, with a credential of their own: no settings, no actors, no further packages.

Start reading at score_requests.py (what a reward worker receives and answers).
"""
