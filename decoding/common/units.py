"""Numbers with units, for people."""

from rich.filesize import decimal


def size(count: float) -> str:
    """Bytes in words, such as "3.2 MB"."""
    return decimal(int(count))


def duration(seconds: float) -> str:
    """Seconds in words, such as "12 min"."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
