"""What the command lines share."""

import sys

from rich.panel import Panel

from data.progress import console


def fail(message: str) -> None:
    """Print one paragraph and exit with status 1."""
    console.print(Panel(message, title="error", border_style="red"), soft_wrap=False)
    sys.exit(1)
