"""Rows that come in and samples that go out: data files, and dumps of whole runs.

Open data_files.py for what is read, dumps.py for what is written.
"""
