"""`python -m gsq_module.report RUN_DIR`: write a finished run's report again."""

from __future__ import annotations

import sys
from pathlib import Path

from gsq_module.report.page import write_report

if len(sys.argv) != 2:
    sys.exit(__doc__)
try:
    print(write_report(Path(sys.argv[1])))
except (FileNotFoundError, ValueError) as error:
    sys.exit(f"error: {error}")
