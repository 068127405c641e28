"""Matrix products: prepacked weights on a CPU, how many rows make them batch-invariant, linear layers with LoRA."""
