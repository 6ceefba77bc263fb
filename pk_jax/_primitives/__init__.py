"""How JAX sees an op: argument checks, abstract eval, lowering, batching, transposition."""
