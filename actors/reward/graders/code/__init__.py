"""The grader `code`: a Python program of the response against tests, in namespaces of its own.

Open grader.py first; running.py starts a program, and launcher.py is what runs inside.
"""
