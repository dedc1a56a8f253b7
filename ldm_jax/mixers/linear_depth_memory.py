"""Linear depth memory (LDM): a small matrix memory per token beside the residual stream.

Each sublayer writes its output under a key, the next one queries the memory:

    x ← x + v,   M ← write(M, k, v)        after sublayer l
    h = x + gain · gate · M q              before sublayer l + 1

Keys, queries, gates and importances come from small MLPs on the residual stream, one shared latent
for the read side and one for the write side.  D is cut into G contiguous groups, each with its own
memory, query, key and forgetting factor.  Source: the Depth Memory framework text and the Linear
Depth Memory tutorial; activations, initial values and the delta rule are this project's own.
"""

import math
from typing import Any

import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from ldm_jax.errors import InputError
from ldm_jax.mixers.base import DepthMixer
from ldm_jax.ops import depth_memory as dm
from ldm_jax.ops.normalize import l2norm
from ldm_jax.sharding import constrain, partitioned
from ldm_jax.typing import ActivationsBTD, Dtype

_RULES = ("rls", "delta", "outer")
_READOUTS = ("add", "memory_only")

_zeros = nn.initializers.zeros
# Lecun-normal over the true fan-in: the last axes of a head kernel [R, G, K] are all outputs.
_head_init = nn.initializers.variance_scaling(
  1.0, "fan_in", "truncated_normal", in_axis=0, out_axis=(1, 2)
)


@flax.struct.dataclass
class DepthMemoryStreams:
  """The streams (x, M, P) of the RLS rule; (x, M) of the outer-product and delta rules.

  x: residual stream [B, T, D].  M: memory.  P: inverse key covariance [B, T, G, K, K], float32,
  or None where the rule has none.  pending: sum of the outputs since the last write [B, T, D], or
  None where every output is written at once.  The axis order of M is the mixer's business; use
  `memory_matrix()` to look at it.
  """

  x: Any
  M: Any
  P: Any = None
  pending: Any = None

  def memory_matrix(self) -> Float[Array, "B T G V K"]:
    """The memory as matrices [B, T, G, V, K]: column space of group g is x[g·V : (g+1)·V]."""
    return self.M


class LinearDepthMemory(DepthMixer):
  """The linear depth memory as a depth mixer.

  Attributes:
    index: sublayer number from 0.  Before the first write the memory is empty: the read is x,
      without parameters.
    rule: how an output enters the memory: "rls" keeps M the exact ridge regression from keys to
      outputs, "delta" takes one gradient step on it, "outer" adds v kᵀ.
    groups: G; must divide the width D.
    key_dim: K, at least 1; may exceed the number of sublayers.
    shared_key: one key for all groups instead of one each.
    latent_dim: R, the width of the two control latents.
    alpha: inverse ridge strength, P₋₁ = α I.
    min_forgetting: lower bound of the learned forgetting factors λ.
    forgetting_init: λ at initialisation.
    gain_init: read gain at initialisation.  At 0 the network starts as PreLN to the bit, which
      suits one that is trained already; from scratch the memory then takes part too late (with 1
      small models ended 0.1 to 0.2 nats lower, see the README), so the presets start with 1.
    key_bias_init: every component of the key and query biases at initialisation.  At 0 they point
      anywhere; the larger, the more alike they start, and the closer M q is to the weighted mean of
      the outputs so far.
    memory_dtype: dtype in which M is carried ("float32" or "bfloat16"); sums are float32.
    readout: "add" reads x + gain · gate · M q; "memory_only" reads M q alone (an ablation; there is
      no gain and no gate then).
    residual: False replaces x ← x + v by x ← v (an ablation).
    forgetting: False holds λ at 1 (an ablation).
    importance: False holds ω at 1 (an ablation).
    write_embedding: True makes the embedding the memory's first record, under the fixed key
      (1, …, 1) / √K with importance 1, so that reads can draw on it as on any output; False starts
      from an empty memory.
    write_every: sublayers per write; each write takes the sum of their outputs, under a key from
      the residual stream after the last of them (2 is one write per block, an ablation).
    dtype: dtype of the control matrix products.
  """

  rule: str = "rls"
  groups: int = 16
  key_dim: int = 8
  shared_key: bool = False
  latent_dim: int = 64
  alpha: float = 1.0
  min_forgetting: float = 0.5
  forgetting_init: float = 0.98
  gain_init: float = 0.0
  key_bias_init: float = 0.0
  memory_dtype: Dtype = "float32"
  readout: str = "add"
  residual: bool = True
  forgetting: bool = True
  importance: bool = True
  write_embedding: bool = False
  write_every: int = 1

  def __post_init__(self):
    for setting, choices in (("rule", _RULES), ("readout", _READOUTS)):
      self.require(setting, getattr(self, setting) in choices, f"one of {', '.join(choices)}")
    for setting in ("groups", "key_dim", "latent_dim", "write_every"):
      self.require(setting, getattr(self, setting) >= 1, "at least 1")
    super().__post_init__()

  def setup(self):
    """Declares both control networks; parameters appear only where they are used."""
    names = ("groups", "key_dim", "latent_dim", "key_bias_init", "dtype")
    shared = {name: getattr(self, name) for name in names}
    self.read_controls = ReadControls(
      **shared, gain_init=self.gain_init, gated=self.readout == "add"
    )
    self.write_controls = WriteControls(
      **shared,
      rule=self.rule,
      shared_key=self.shared_key,
      min_forgetting=self.min_forgetting,
      forgetting_init=self.forgetting_init,
      forgetting=self.forgetting,
      importance=self.importance,
    )

  def init_streams(self, x: ActivationsBTD) -> DepthMemoryStreams:
    """x with an empty memory, M = 0 and P = α I, or one that holds the embedding.

    Raises:
      InputError: if the width is not divisible by `groups`.
    """
    value_dim, rest = divmod(x.shape[-1], self.groups)
    if rest:
      raise InputError(
        f"groups: the width {x.shape[-1]} is not divisible by groups = {self.groups}; "
        "choose a divisor of the width"
      )
    M, P = dm.rls_init(x.shape[:2], self.groups, value_dim, self.key_dim, self.alpha)
    M = M.astype(self.memory_dtype)
    if self.write_embedding:
      k_BTGK = jnp.full(P.shape[:-1], self.key_dim**-0.5, P.dtype)
      M, P = self._write_record(M, P, k_BTGK, x, 1.0, 1.0)
    pending = jnp.zeros_like(x) if self.write_every > 1 else None
    return self._place(DepthMemoryStreams(x, M, P, pending))

  def read(self, streams: DepthMemoryStreams) -> ActivationsBTD:
    """h = x + concat_g(gain_g · gate_g · M_g q_g), or M q alone; x where nothing is written yet."""
    x = streams.x
    if self.index < self.write_every:
      return x
    q_BTGK, scale_BTG = self.read_controls(x)
    r_BTGV = dm.read(streams.M, q_BTGK)
    if self.readout == "memory_only":
      return r_BTGV.reshape(x.shape).astype(x.dtype)
    return x + (scale_BTG[..., None] * r_BTGV).reshape(x.shape).astype(x.dtype)

  def write(self, streams: DepthMemoryStreams, v: ActivationsBTD) -> DepthMemoryStreams:
    """x ← x + v, then (k, v) enters the memory under a key computed from the new x."""
    x = streams.x + v if self.residual else v
    M, P, pending = streams.M, streams.P, streams.pending
    if pending is not None:
      v, pending = pending + v, jnp.zeros_like(pending)
    if (self.index + 1) % self.write_every:
      return self._place(DepthMemoryStreams(x, M, P, v))
    k_BTGK, strength_BTG, forgetting_G = self.write_controls(x)
    M, P = self._write_record(M, P, k_BTGK, v, strength_BTG, forgetting_G)
    return self._place(DepthMemoryStreams(x, M, P, pending))

  def _write_record(self, M, P, k_BTGK, v, strength, forgetting):
    """(k, v) enters the memory by the rule; strength is ω or β."""
    v_BTGV = v.reshape(*v.shape[:2], self.groups, -1)
    if self.rule == "rls":
      return dm.rls_write(M, P, k_BTGK, v_BTGV, forgetting, strength)
    if self.rule == "delta":
      return dm.delta_write(M, k_BTGK, v_BTGV, strength), P
    return dm.outer_write(M, k_BTGK, v_BTGV), P

  def _place(self, streams):
    """Drops P where the rule has none and pins the sharding of each stream."""
    token, pending, P = ("batch", "sequence"), streams.pending, None
    if self.rule == "rls":
      P = constrain(streams.P, *token, "groups", None, None)
    if pending is not None:
      pending = constrain(pending, *token, "activation_embed")
    return DepthMemoryStreams(
      constrain(streams.x, *token, "activation_embed"),
      constrain(streams.M, *token, "groups", "group_width", "key_dim"),
      P,
      pending,
    )


class Latent(nn.Module):
  """The shared latent of one side: silu(W norm(x) + b), [B, T, D] -> [B, T, R].

  norm is RMSNorm without a learned scale, so the controls see the direction of the residual stream
  and not its growth with depth.
  """

  latent_dim: int
  dtype: Dtype

  @nn.compact
  def __call__(self, x: ActivationsBTD) -> Float[Array, "B T R"]:
    """Returns the latent in `dtype`."""
    init = partitioned(nn.initializers.lecun_normal(), "stream_embed", "latent")
    kernel = self.param("latent_kernel", init, (x.shape[-1], self.latent_dim))
    bias = self.param("latent_bias", partitioned(_zeros, "latent"), (self.latent_dim,))
    normed = nn.RMSNorm(use_scale=False, dtype=self.dtype)(x)
    product = jnp.einsum("btd,dr->btr", normed, kernel.astype(self.dtype))
    return nn.silu(product + bias.astype(self.dtype)[None, None])


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

  @nn.compact
  def __call__(
    self, x: ActivationsBTD
  ) -> tuple[Float[Array, "B T G K"], Float[Array, "B T G"] | None]:
    """Returns the unit queries and gain · gate, both float32; None in place of gain · gate for the
    memory-only read-out.
    """  # fmt: skip
    latent = Latent(self.latent_dim, self.dtype, name="latent")(x)
    q = l2norm(_vector_head(self, "query", latent, self.groups, self.key_dim))
    if not self.gated:
      return q, None
    gate = jax.nn.sigmoid(_number_head(self, "gate", latent, self.groups, 0.0))
    init = partitioned(nn.initializers.constant(self.gain_init), "groups")
    gain = self.param("gain", init, (self.groups,))
    return q, gain[None, None] * gate


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

  @nn.compact
  def __call__(
    self, x: ActivationsBTD
  ) -> tuple[Float[Array, "B T G K"], Float[Array, "B T G"] | None, Float[Array, " G"] | None]:
    """Returns unit keys, ω (or β, or None) and λ (or None), all float32."""
    latent = Latent(self.latent_dim, self.dtype, name="latent")(x)
    k = l2norm(
      _vector_head(self, "key", latent, 1 if self.shared_key else self.groups, self.key_dim)
    )
    k = jnp.broadcast_to(k, (*x.shape[:2], self.groups, self.key_dim))
    if self.rule == "outer":
      return k, None, None
    if self.rule == "delta":
      return k, jax.nn.sigmoid(_number_head(self, "beta", latent, self.groups, 0.0)), None
    if not self.importance:
      return k, jnp.ones(k.shape[:-1], jnp.float32), self._forgetting_factors()
    one = math.log(math.e - 1)  # softplus(one) = 1
    importance = jax.nn.softplus(_number_head(self, "importance", latent, self.groups, one))
    return k, importance, self._forgetting_factors()

  def _forgetting_factors(self):
    if not self.forgetting:
      return jnp.ones((self.groups,), jnp.float32)
    fraction = (self.forgetting_init - self.min_forgetting) / (1 - self.min_forgetting)
    logit = math.log(fraction / (1 - fraction))
    init = partitioned(nn.initializers.constant(logit), "groups")
    theta = self.param("forgetting", init, (self.groups,))
    return self.min_forgetting + (1 - self.min_forgetting) * jax.nn.sigmoid(theta)


def _vector_head(module, name, latent, groups, size):
  """A [B, T, G, K] affine map of the latent, float32 out of the product."""
  axes = ("groups" if groups > 1 else None, "key_dim")
  shape = (groups, size)
  kernel = module.param(
    f"{name}_kernel", partitioned(_head_init, "latent", *axes), (latent.shape[-1], *shape)
  )
  init = nn.initializers.constant(module.key_bias_init)
  bias = module.param(f"{name}_bias", partitioned(init, *axes), shape)
  product = jnp.einsum(
    "btr,rgk->btgk", latent, kernel.astype(latent.dtype), preferred_element_type=jnp.float32
  )
  return product + bias[None, None]


def _number_head(module, name, latent, groups, bias_init):
  """A [B, T, G] affine map of the latent that starts at the constant `bias_init`."""
  kernel = module.param(
    f"{name}_kernel", partitioned(_zeros, "latent", "groups"), (latent.shape[-1], groups)
  )
  init = partitioned(nn.initializers.constant(bias_init), "groups")
  bias = module.param(f"{name}_bias", init, (groups,))
  product = jnp.einsum(
    "btr,rg->btg", latent, kernel.astype(latent.dtype), preferred_element_type=jnp.float32
  )
  return product + bias[None, None]
