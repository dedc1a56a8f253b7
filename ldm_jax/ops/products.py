"""Products that stay float32 on every machine."""

import functools

import jax
import jax.numpy as jnp

# Left alone, TPUs multiply float32 as bfloat16 and GPUs as TF32, which is good enough for weights
# but not for a recursion that is to be a regression, nor for coefficients that papers want exact.
exact_einsum = functools.partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)
