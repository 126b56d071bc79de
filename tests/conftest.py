"""Also makes `tests/` importable: `from toy_models import ...` works in every test folder, under xdist as well."""

from __future__ import annotations

import torch

# Toy matrices gain nothing from a second thread, and pytest-xdist runs one process a core.
torch.set_num_threads(1)
