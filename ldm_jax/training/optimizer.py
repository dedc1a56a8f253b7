"""AdamW with decay by parameter role, warm-up and cosine."""

import jax
import optax

from ldm_jax.config import OptimizerConfig
from ldm_jax.typing import PyTree

# What each parameter is for, by the last name of its path.  Weight decay pulls a matrix towards
# zero, which regularises ordinary weights; on gates, gains, biases, queries and forgetting factors
# it would pull towards an arbitrary behaviour instead.  A new parameter must be given a role here.
DECAYED = frozenset({"kernel", "embedding", "head_kernel", "latent_kernel", "key_kernel"})
UNDECAYED = frozenset(
  {
    "scale",
    "gain",
    "forgetting",
    "query_kernel",
    "gate_kernel",
    "importance_kernel",
    "beta_kernel",
    "latent_bias",
    "query_bias",
    "key_bias",
    "gate_bias",
    "importance_bias",
    "beta_bias",
    # attention residuals
    "query",
    "norm_scale",
    # hyper-connections
    "read_weight",
    "mix_weight",
    "write_weight",
    "read_kernel",
    "mix_kernel",
    "write_kernel",
    "alpha_scale",
    "beta_scale",
    # manifold-constrained hyper-connections
    "pre_kernel",
    "pre_bias",
    "pre_scale",
    "post_kernel",
    "post_bias",
    "post_scale",
    "res_kernel",
    "res_bias",
    "res_scale",
  }
)


def decay_mask(params: PyTree) -> PyTree:
  """Which parameters have weight decay: a tree of bools, by role and not by rank.

  Raises:
    ValueError: for a parameter whose name has no role.
  """

  def decays(path, _):
    names = [key.key for key in path if isinstance(key, jax.tree_util.DictKey)]
    if names[-1] not in DECAYED | UNDECAYED:
      raise ValueError(f"parameter {'/'.join(names)} has no weight-decay role in optimizer.py")
    return names[-1] in DECAYED

  return jax.tree_util.tree_map_with_path(decays, params)


def learning_rate_schedule(config: OptimizerConfig, steps: int) -> optax.Schedule:
  """Linear from peak / warmup_steps to the peak, then cosine to final_fraction x peak.

  Args:
    config: the optimizer section.
    steps: length of the run; the last step, steps − 1, has nearly the final rate.

  Returns:
    A function of the step counted from 0.  No step has rate 0 unless final_fraction is 0.
  """
  warmup = config.warmup_steps
  return optax.warmup_cosine_decay_schedule(
    init_value=config.learning_rate / max(warmup, 1),
    peak_value=config.learning_rate,
    warmup_steps=warmup,
    decay_steps=max(steps, warmup + 1),
    end_value=config.learning_rate * config.final_fraction,
  )


def make_optimizer(config: OptimizerConfig, steps: int) -> optax.GradientTransformation:
  """Clips by global norm, then AdamW (arXiv 1711.05101); moments are float32 as the parameters."""
  return optax.chain(
    optax.clip_by_global_norm(config.clip_norm),
    optax.adamw(
      learning_rate_schedule(config, steps),
      b1=config.beta1,
      b2=config.beta2,
      weight_decay=config.weight_decay,
      mask=decay_mask,
    ),
  )
