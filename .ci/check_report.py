"""Exit non-zero unless a finished run's report is there and holds finite, plausible numbers."""

import json
import math
import sys
from pathlib import Path

from nde_talf.evaluation.protocol import trusted

MOST = 9  # methods that a default run decodes under one setting

folder = Path(sys.argv[1])
html = (folder / "index.html").read_text()
results = json.loads((folder / "results.json").read_text())
records = [json.loads(line) for line in (folder / "records.jsonl").read_text().splitlines()]
tables = results["tables"]
if len(tables) < 2 or "<table" not in html or "<img" not in html or not list(folder.glob("*.png")):
    sys.exit(f"{folder}: the report is incomplete")
for setting, rows in tables.items():
    names = [row["method"] for row in rows]
    same = results["titles"][setting]["same"]
    if len(names) + len(same) < MOST or len(names) > MOST:
        sys.exit(
            f"{setting}: {len(names)} methods decoded and {len(same)} the same as another; expected"
            f" {MOST} in all"
        )
    if missing := [name for name in (*same.values(), *names[:2]) if name not in names]:
        sys.exit(f"{setting}: {missing} is not in the table")
    verdict = results["verdicts"][setting]
    supported = bool(trusted(verdict["control"], verdict["speedup"]))
    told = any(line.startswith(verdict["sentence"]) for line in results["summary"])
    if (verdict["clock"] == "trusted") != supported or not told:
        sys.exit(
            f"{setting}: the verdict does not follow from the A/A control {verdict['control']}"
        )
    for row in rows:
        numbers = [
            *row["block_efficiency"],
            row["tokens_per_second"],
            *row["speedup"],
            *row["cpu_speedup"],
        ]
        if not all(math.isfinite(x) and x > 0 for x in numbers):
            sys.exit(f"{setting}, {row['method']}: {numbers}")
        if (
            not row["method"].startswith("transformers assisted")
            and row["block_efficiency"][0] < 0.999
        ):
            sys.exit(f"{setting}, {row['method']}: block efficiency below 1")
        own = [r for r in records if (r["setting"], r["method"]) == (setting, row["method"])]
        if sum(r["tokens"] for r in own) != sum(
            (int(n) + 1) * steps for r in own for n, steps in r["accepted"].items()
        ):
            sys.exit(
                f"{setting}, {row['method']}: accepted tokens and passes do not add up to its"
                " tokens"
            )
print(f"report holds {sum(map(len, tables.values()))} rows in {len(tables)} settings")
