"""How what ships was made: commands that maintainers run from a checkout, not part of the wheel."""
