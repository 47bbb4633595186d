"""Write visits.csv: stays in 60 wards of a hospital, with the days of each, made up by a law that differs by ward."""

import numpy as np
import pandas as pd

rng = np.random.default_rng(0)
tables = []
for ward in range(60):
    rows, slow = int(rng.integers(20, 60)), rng.normal()
    table = pd.DataFrame({"ward": f"ward-{ward}", "age": rng.integers(18, 95, rows)})
    table["weight"] = rng.normal(75, 12, rows).round(1)
    table["admitted"] = rng.choice(["planned", "emergency"], rows)
    days = (
        2
        + 0.08 * table["age"]
        + 4 * (table["admitted"] == "emergency")
        + slow
        + rng.normal(0, 2, rows)
    )
    tables.append(table.assign(days=days.clip(0, 30).round()))
pd.concat(tables).to_csv("visits.csv", index=False)
