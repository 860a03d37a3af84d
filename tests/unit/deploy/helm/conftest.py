"""Skips the tests of the Helm chart if Helm is not built."""

from __future__ import annotations

import pytest

from tests.support.cache import locked
from tests.support.kubernetes.go_program import CACHE, HELM


@pytest.fixture(autouse=True, scope="session")
def _helm() -> None:
    """Find Helm. `make test` builds it if there is Go; `make ci` fails if it cannot build it.

    `make ci` may still be building it.
    """
    with locked(CACHE, HELM.name):
        is_built = HELM.path.exists()
    if not is_built:
        pytest.skip(
            f"Helm {HELM.version} is not built: python -m tests.support.kubernetes.go_program (needs Go)"
        )
