"""The torch inference loop and its mathematics.

Imports nothing else of the project.
"""
