"""Shared tools that belong to no room: errors, files, progress, intervals, work in parallel.

It imports nothing of ours.
"""
