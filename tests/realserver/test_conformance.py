"""The Tinker backend conforms, over the real SDK and a real server."""

from __future__ import annotations

import pytest

import rlkit
from rlkit.testing import BackendConformance


class TestRealServer(BackendConformance):
    recovers = False
    tempered = False
    exact = False

    @pytest.fixture(autouse=True)
    def _server(self, summing):
        self.server = summing

    def make(self, folder, **options):
        if "resume_from" not in options and "init_from" not in options:
            options["model"] = self.server.model
            options["lora"] = rlkit.Lora(rank=4)
        return rlkit.connect(
            "tinker", base_url=self.server.url, max_length=128, deadline=1200.0, server_losses="never", **options
        )
