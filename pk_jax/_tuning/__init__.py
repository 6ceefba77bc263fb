"""What a machine can do, what an op should cost on it, and which candidate to run."""
