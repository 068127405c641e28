"""Conversations as tokens: rendered with the model's own chat template, and never changed once they were sampled."""

from __future__ import annotations

from rlkit.chat._core import Chat, Conversation

__all__ = ["Chat", "Conversation"]
