"""The Tinker backend conforms, over the real SDK and a service in this process."""

from __future__ import annotations

import pytest

import rlkit
from rlkit.testing import BackendConformance, FakeTinker

pytest.importorskip("tinker", reason="needs the extra tinker")


class TestTinker(BackendConformance):
    recovers = False
    tempered = False
    offers = ()

    @pytest.fixture(autouse=True)
    def _service(self):
        from rlkit.server._models import toy_models

        with FakeTinker(seed=0, models=toy_models(max_length=128)) as fake:
            self.fake = fake
            yield

    def make(self, folder, **options):
        return rlkit.connect(
            "tinker", model="toy", base_url=self.fake.base_url, api_key=self.fake.api_key, deadline=30.0, **options
        )
