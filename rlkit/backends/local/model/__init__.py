"""The base model and its forward pass: loading, LoRA, decoder layers with their backward pass, the output embedding."""
