"""The measuring engine: what `pk-jax bench` and the checkout's benchmarks share."""
