"""Stages in order, from the command line."""
