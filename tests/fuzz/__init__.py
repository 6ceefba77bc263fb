"""Differential test of the collectives: random programs, run with pk_jax and with jax.lax.

`draws` is where the randomness comes from, `cases` what a program is, `generate` makes one,
`operands` fills it with numbers, `transforms` turns it into a function, `model` says in NumPy what
lax cannot, `compare` judges, `known` lists where pk_jax differs on purpose, and `runner` drives.
`python -m fuzz --help`, from the folder `tests`, runs it.
"""
