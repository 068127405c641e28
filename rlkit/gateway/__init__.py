"""The endpoints that agents speak, over any policy: what is sampled through them is what is trained."""
