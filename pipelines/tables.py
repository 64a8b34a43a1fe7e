"""Where latency tables lie: the run's own, the profiles that come with the project, or a file of the user's."""

from pathlib import Path

from decoding.common.errors import UserError

TABLE = "table.json"
MEASURED = "measured"
PROFILES = Path(__file__).parents[1] / "configs" / "latency"


def table_file(name: str, latency: Path) -> Path:
    """Where a latency table lies: "measured" (in the folder `latency`), a profile of configs/latency, or a file."""
    if name == MEASURED:
        return latency / TABLE
    path = PROFILES / f"{name}.json" if not name.endswith(".json") else Path(name)
    if not path.is_file():
        known = ", ".join([MEASURED, *sorted(p.stem for p in PROFILES.glob("*.json"))])
        raise UserError(f"selector.tables: there is no latency table {name!r}; choose from {known}, or give a .json file.")
    return path
