"""The torch inference loop and its mathematics.

Imports nothing else of the project, and of third parties torch alone (transformers only where a
model is loaded).
"""
