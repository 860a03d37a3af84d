"""Whether tests run in their long form, as in `make soak`."""

from __future__ import annotations

import os

SOAK = bool(os.environ.get("TIDEVOY_SOAK"))
