"""Where prompts come from: data files, users' functions, demonstrations; rendered and tokenised.

Open source.py first.
"""
