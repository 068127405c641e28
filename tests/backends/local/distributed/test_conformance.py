"""A local backend on two processes conforms."""

from __future__ import annotations

import pytest

from rlkit.testing import BackendConformance

pytest.importorskip("peft")


class TestTwoProcesses(BackendConformance):
    """With several micro-batches on each."""

    @pytest.fixture(autouse=True)
    def _connect(self, connect):
        self.connect = connect

    def make(self, folder, **options):
        return self.connect(folder=folder, micro_batch_tokens=16, **options)
