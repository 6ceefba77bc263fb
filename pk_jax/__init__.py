"""pk_jax: multi-GPU collectives for JAX that treat a peer's memory as one more memory level."""

from pk_jax import tp as tp
from pk_jax._doctor import doctor as doctor
from pk_jax._redirect import jax_collectives as jax_collectives
from pk_jax._registry import last_error as last_error
from pk_jax.attention import attention as attention
from pk_jax.attention import ring_attention as ring_attention
from pk_jax.attention import ulysses_attention as ulysses_attention
from pk_jax.attention import unzigzag as unzigzag
from pk_jax.attention import zigzag as zigzag
from pk_jax.collective_matmul import all_gather_matmul as all_gather_matmul
from pk_jax.collective_matmul import matmul_all_reduce as matmul_all_reduce
from pk_jax.collective_matmul import matmul_reduce_scatter as matmul_reduce_scatter
from pk_jax.collectives import all_gather as all_gather
from pk_jax.collectives import all_to_all as all_to_all
from pk_jax.collectives import pmax as pmax
from pk_jax.collectives import pmean as pmean
from pk_jax.collectives import pmin as pmin
from pk_jax.collectives import ppermute as ppermute
from pk_jax.collectives import psum as psum
from pk_jax.collectives import psum_scatter as psum_scatter
from pk_jax.collectives import ragged_all_to_all as ragged_all_to_all
from pk_jax.config import Config as Config
from pk_jax.config import use_config as use_config
from pk_jax.custom_ops import call_op as call_op
from pk_jax.custom_ops import get_include as get_include
from pk_jax.custom_ops import load_ops as load_ops
from pk_jax.grouped_matmul import ragged_dot as ragged_dot
from pk_jax.local_matmul import matmul as matmul

__version__ = "0.1.0"
