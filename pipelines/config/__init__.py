"""Configuration: keys, defaults, checks, and the command line that sets them."""
