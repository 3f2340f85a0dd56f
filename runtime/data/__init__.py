"""Data files to read, and dumps of samples.

Open data_files.py for data files, dumps.py for dumps.
"""
