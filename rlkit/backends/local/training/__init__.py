"""Training: micro-batches that share prefixes, their forward and backward pass, AdamW."""
