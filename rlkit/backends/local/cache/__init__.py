"""What is kept of tokens that were computed: KV caches, caches of prefixes, and attention over them."""
