"""Exit non-zero unless a finished run's report is there and holds finite, plausible numbers."""

import json
import math
import sys
from pathlib import Path

folder = Path(sys.argv[1])
html = (folder / "index.html").read_text()
results = json.loads((folder / "results.json").read_text())
tables = results["tables"]
if len(tables) < 2 or "<table" not in html or not list(folder.glob("*.png")):
    sys.exit(f"{folder}: the report is incomplete")
for setting, rows in tables.items():
    if len(rows) < 9:
        sys.exit(f"{setting}: only {len(rows)} methods")
    for row in rows:
        numbers = [*row["block_efficiency"], row["tokens_per_second"], *row["speedup"]]
        if not all(math.isfinite(x) and x > 0 for x in numbers):
            sys.exit(f"{setting}, {row['method']}: {numbers}")
        if row["method"] != "transformers assisted" and row["block_efficiency"][0] < 0.999:
            sys.exit(f"{setting}, {row['method']}: block efficiency below 1")
print(f"report holds {sum(map(len, tables.values()))} rows in {len(tables)} settings")
