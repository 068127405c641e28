"""SkyRL's scheduler, alone in the server's Python: a gradient and its optimizer step that arrive while it asks."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.realserver.conftest import PYTHON

PROGRAM = """
import sys, typing, typing_extensions
typing.TypedDict = typing_extensions.TypedDict
sys.path.insert(0, sys.argv[1])
import launch
from skyrl.tinker.db_models import FutureDB, RequestStatus
from skyrl.tinker.engine import TinkerEngine
from skyrl.tinker.types import RequestType
from sqlmodel import Session, SQLModel, create_engine

if sys.argv[2] == "patched":
    launch.patch_scheduler()
store = create_engine(f"sqlite:///{sys.argv[3]}")
SQLModel.metadata.create_all(store)
engine = object.__new__(TinkerEngine)
SENT = {RequestType.FORWARD_BACKWARD: {"data": [], "loss_fn": "cross_entropy"}, RequestType.OPTIM_STEP: {}}


def arrive():
    with Session(store) as session:
        for kind, body in SENT.items():  # in the order in which a client sends them
            request = FutureDB(request_type=kind, model_id="m", request_data=body, status=RequestStatus.PENDING)
            session.add(request)
            session.commit()


def round_of_queries(between):
    with Session(store) as session:
        gradients = engine.find_batchable_model_passes(session, RequestType.FORWARD_BACKWARD)
        between()
        return len(gradients), len(engine.find_single_requests(session))


print(*round_of_queries(arrive), *round_of_queries(lambda: None))
"""


@pytest.mark.parametrize(("scheduler", "expected"), [("stock", "0 1 1 1"), ("patched", "0 0 1 1")])
def test_a_step_waits_for_its_gradient(tmp_path, scheduler, expected):
    """Gradients and steps that a round finds, and the next one: as installed it takes the step alone."""
    python = os.environ.get(PYTHON)
    if not python:
        pytest.skip(f"${PYTHON} is not set: `make test-server` installs a real server and runs this")
    command = [python, "-c", PROGRAM, str(Path(__file__).parent), scheduler, str(tmp_path / "store.db")]
    said = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert said.stdout.split() == expected.split(), said.stderr
