"""What the depth memory is told: keys, queries, gates, importances, from the residual stream.

One latent for each side, silu(W norm(x) + b) with an RMSNorm without scale, and affine maps of it.
The norm is one number per token, so it waits until after the product with W.
"""

import math
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from ldm_jax.ops.depth_memory.natural import Natural
from ldm_jax.sharding import partitioned
from ldm_jax.typing import ActivationsBTD, Dtype

_zeros = nn.initializers.zeros
# Lecun-normal over the true fan-in: the last axes of a head kernel [R, G, K] are all outputs.
_head_init = nn.initializers.variance_scaling(
  1.0, "fan_in", "truncated_normal", in_axis=0, out_axis=(1, 2)
)


class ControlMaps(NamedTuple):
  """The parameters of one side, pairs of kernel and bias.

  latent: of silu(W norm(x) + b), [D, R] and [R].
  vectors: of the affine map to keys or queries, [R, G, K] and [G, K], or with 1 in place of G.
  numbers: of the affine map to a number for each group, [R, G] and [G]; None without one.
  """

  latent: tuple
  vectors: tuple
  numbers: tuple | None


class Latent(nn.Module):
  """The parameters of the shared latent of one side: silu(W norm(x) + b), R numbers for each token.

  norm is RMSNorm without a learned scale, so the controls see the direction of the residual stream
  and not its growth with depth.
  """

  latent_dim: int

  @nn.compact
  def __call__(self, width: int) -> tuple[jax.Array, jax.Array]:
    """Returns W [D, R] and b [R] for a residual stream of a width D."""
    init = partitioned(nn.initializers.lecun_normal(), "stream_embed", "latent")
    kernel = self.param("latent_kernel", init, (width, self.latent_dim))
    bias = self.param("latent_bias", partitioned(_zeros, "latent"), (self.latent_dim,))
    return kernel, bias


class ReadControls(nn.Module):
  """Query, gate and gain of one read, from the residual stream before the sublayer.

  a = silu(W_r norm(x) + b_r),  q = l2norm(W_q a + b_q),  scale = gain · sigmoid(W_γ a + b_γ).
  """

  groups: int
  key_dim: int
  latent_dim: int
  key_bias_init: float
  gain_init: float
  gated: bool
  dtype: Dtype

  def __call__(self, x: ActivationsBTD, layout: Any = None) -> tuple[jax.Array, jax.Array | None]:
    """Returns the queries and gain · gate, both float32, laid out as an arithmetic of
    `ops.depth_memory` wants it, as the equations are by default; None in place of gain · gate for
    the memory-only read-out.
    """  # fmt: skip
    layout = Natural(self.groups, self.key_dim) if layout is None else layout
    maps, gain = self.parameters(x.shape[-1])
    return read_controls(layout, *_mapped(layout, x, maps, self.dtype), gain)

  @nn.compact
  def parameters(self, width: int) -> tuple[ControlMaps, Float[Array, " G"] | None]:
    """The maps for a residual stream of some width, and the gain; None for the memory-only one."""
    latent = Latent(self.latent_dim, name="latent")(width)
    query = _vector_parameters(self, "query", self.groups)
    if not self.gated:
      return ControlMaps(latent, query, None), None
    gate = _number_parameters(self, "gate", 0.0)
    init = partitioned(nn.initializers.constant(self.gain_init), "groups")
    return ControlMaps(latent, query, gate), self.param("gain", init, (self.groups,))


class WriteControls(nn.Module):
  """Key, strength and forgetting of one write, from the residual stream after the sublayer.

  c = silu(W_w norm(x) + b_w),  k = l2norm(W_k c + b_k),  ω = softplus(W_ω c + b_ω), 1 at the start,
  λ = λ_min + (1 − λ_min) sigmoid(θ) with θ per sublayer and group.  The delta rule has a step size
  β = sigmoid(W_β c + b_β) in place of ω and λ; the outer-product rule has neither.
  """

  groups: int
  key_dim: int
  latent_dim: int
  key_bias_init: float
  rule: str
  shared_key: bool
  min_forgetting: float
  forgetting_init: float
  forgetting: bool
  importance: bool
  dtype: Dtype

  def __call__(
    self, x: ActivationsBTD, layout: Any = None
  ) -> tuple[jax.Array, jax.Array | None, Float[Array, " G"] | None]:
    """Returns keys and ω (or β, or None), float32 in a layout, and λ (or None)."""
    layout = Natural(self.groups, self.key_dim) if layout is None else layout
    maps, forgetting = self.parameters(x.shape[-1])
    k, numbers = _mapped(layout, x, maps, self.dtype)
    if self.rule == "rls":
      k, importance = write_controls(layout, k, numbers)
      return self._for_all(k), importance, forgetting
    beta = None if numbers is None else jax.nn.sigmoid(numbers)
    return self._for_all(layout.unit(k)), beta, None

  @nn.compact
  def parameters(self, width: int) -> tuple[ControlMaps, Float[Array, " G"] | None]:
    """The maps for a residual stream of some width, and λ, or None where the rule has none."""
    latent = Latent(self.latent_dim, name="latent")(width)
    key = _vector_parameters(self, "key", 1 if self.shared_key else self.groups)
    numbers = None
    if self.rule == "delta":
      numbers = _number_parameters(self, "beta", 0.0)
    elif self.rule == "rls" and self.importance:
      one = math.log(math.e - 1)  # softplus(one) = 1
      numbers = _number_parameters(self, "importance", one)
    return ControlMaps(latent, key, numbers), self._forgetting() if self.rule == "rls" else None

  def _for_all(self, k):
    if self.shared_key:  # groups are the third axis in every layout
      k = jnp.broadcast_to(k, (*k.shape[:2], self.groups, k.shape[3]))
    return k

  def _forgetting(self):
    if not self.forgetting:
      return jnp.ones((self.groups,), jnp.float32)
    fraction = (self.forgetting_init - self.min_forgetting) / (1 - self.min_forgetting)
    logit = math.log(fraction / (1 - fraction))
    init = partitioned(nn.initializers.constant(logit), "groups")
    theta = self.param("forgetting", init, (self.groups,))
    return self.min_forgetting + (1 - self.min_forgetting) * jax.nn.sigmoid(theta)


def read_controls(
  layout: Any, queries: jax.Array, gates: jax.Array | None, gain: jax.Array | None
) -> tuple[jax.Array, jax.Array | None]:
  """Unit queries and gain · gate from what the maps gave."""
  scale = None if gates is None else layout.per_group(gain) * jax.nn.sigmoid(gates)
  return layout.unit(queries), scale


def write_controls(
  layout: Any, keys: jax.Array, importances: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
  """Unit keys and ω from what the maps gave; 1 without a map for ω."""
  keys = layout.unit(keys)
  return keys, layout.ones(keys) if importances is None else jax.nn.softplus(importances)


def _mapped(layout, x, maps, dtype):
  """What the maps give: vectors, and numbers or None."""
  latent = layout.latent(x, *maps.latent, dtype)
  if maps.numbers is None:
    return layout.vectors(latent, *maps.vectors), None
  return layout.vectors_and_numbers(latent, maps.vectors, maps.numbers)


def _vector_parameters(module, name, groups):
  """Kernel and bias of an affine map of the latent to `groups` vectors."""
  axes = ("groups" if groups > 1 else None, "key_dim")
  init = partitioned(_head_init, "latent", *axes)
  kernel = module.param(f"{name}_kernel", init, (module.latent_dim, groups, module.key_dim))
  init = partitioned(nn.initializers.constant(module.key_bias_init), *axes)
  return kernel, module.param(f"{name}_bias", init, (groups, module.key_dim))


def _number_parameters(module, name, bias_init):
  """Kernel and bias of an affine map to a number for each group, at first `bias_init`."""
  init = partitioned(_zeros, "latent", "groups")
  kernel = module.param(f"{name}_kernel", init, (module.latent_dim, module.groups))
  init = partitioned(nn.initializers.constant(bias_init), "groups")
  return kernel, module.param(f"{name}_bias", init, (module.groups,))
