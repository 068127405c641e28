"""A local backend on two processes conforms."""

from __future__ import annotations

import pytest

from rlkit.testing import BackendConformance

pytest.importorskip("peft")


class TestTwoProcesses(BackendConformance):
    @pytest.fixture(autouse=True)
    def _connect(self, connect):
        self.connect = connect

    def make(self, folder, **options):
        return self.connect(folder=folder, **options)


class TestTwoProcessesSmallBatches(TestTwoProcesses):
    """Several micro-batches on each rank, and adapters that are not merged."""

    def make(self, folder, **options):
        return self.connect(folder=folder, merge=False, micro_batch_tokens=16, **options)
