"""What every room uses and none owns: errors, files, progress, bootstrap intervals, work in parallel. Imports nothing of ours."""
