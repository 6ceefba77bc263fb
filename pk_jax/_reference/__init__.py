"""What each op means, in pure jax.lax: the CPU lowering, the fallback and the oracle of tests."""
