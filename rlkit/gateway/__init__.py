"""The API endpoints that agents use, over any policy: the tokens sampled through them are the tokens trained.

with Gateway(sampler) as gateway, gateway.session(seed=1) as session:
    run_my_agent(session.base_url, session.api_key)
    trajectory = session.trajectory(reward=1.0)
"""

from __future__ import annotations

from rlkit.gateway._gateway import Gateway
from rlkit.gateway._limits import Limits
from rlkit.gateway._recording import Branch, Node
from rlkit.gateway._session import Session
from rlkit.gateway._types import Choice, GatewayError, Reply, Request, Sampling

__all__ = ["Branch", "Choice", "Gateway", "GatewayError", "Limits", "Node", "Reply", "Request", "Sampling", "Session"]

for _public in (Branch, Choice, Gateway, GatewayError, Limits, Node, Reply, Request, Sampling, Session):
    _public.__module__ = __name__  # where users import them from
