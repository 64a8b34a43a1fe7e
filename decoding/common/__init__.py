"""What every room uses and none owns: errors, files, progress, intervals, work in parallel.

It imports nothing of ours.
"""
