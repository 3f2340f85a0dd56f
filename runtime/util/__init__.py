"""Small helpers that the rest of runtime/ uses: files, secrets, retries, formatting, errors.

Open files.py first. Imports nothing else of this project.
"""
