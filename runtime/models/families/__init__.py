"""Declarations of model families, a file each; `runtime.models.family` finds them and says what a declaration has."""
