"""Attention: over prefix trees, slots, chunks and parts, and which of the tokens before it a token sees."""
