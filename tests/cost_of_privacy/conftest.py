"""Parts of the study import each other by name, as scripts of one folder do."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "benchmarks" / "reproduce" / "cost_of_privacy"))
