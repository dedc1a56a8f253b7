"""Strict JAX for every test: 8 CPU devices, no silent rank promotion, highest matmul precision."""

import os

os.environ["JAX_PLATFORMS"] = "cpu"
# Shapes are tiny, so compiling is all the cost; without LLVM optimisations it takes half the time.
os.environ["XLA_FLAGS"] = " ".join(
  (
    os.environ.get("XLA_FLAGS", ""),
    "--xla_force_host_platform_device_count=8",
    "--xla_backend_optimization_level=0",
  )
)

import jax

jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_default_matmul_precision", "highest")
