"""The stages of a run, one file each."""
