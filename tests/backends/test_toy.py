"""The toy backend conforms."""

from __future__ import annotations

from rlkit.backends.toy import ToyBackend
from rlkit.testing import BackendConformance


class TestToy(BackendConformance):
    def make(self, folder, **options):
        return ToyBackend(folder=folder, max_length=128, **options)
