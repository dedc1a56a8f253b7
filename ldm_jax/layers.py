"""The parts of a Llama-like block: norm, rotary positions, attention, SwiGLU, embedding, head."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key

from ldm_jax.cache import Cache, KeyValues, attend
from ldm_jax.ops.attention import attention
from ldm_jax.sharding import constrain, partitioned
from ldm_jax.typing import ActivationsBTD, Dtype, TokensBT

_init = nn.initializers.truncated_normal(0.02)


def _enter(x: ActivationsBTD) -> ActivationsBTD:
  """Gathers the width of what a sublayer's weights are multiplied with."""
  return constrain(x, "batch", "sequence", "sublayer_input")


def _leave(v: ActivationsBTD) -> ActivationsBTD:
  """Splits the width of a sublayer's output as the streams are.

  Whole first: so its gradient is gathered once, for the input's and the weights' gradients alike.
  """
  v = constrain(v, "batch", "sequence", "sublayer_input")
  return constrain(v, "batch", "sequence", "activation_embed")


def rms_norm(dtype: Dtype, name: str) -> nn.Module:
  """RMSNorm over the last axis with a learned scale; statistics in float32."""
  scale_init = partitioned(nn.initializers.ones, "norm")
  return nn.RMSNorm(epsilon=1e-6, dtype=dtype, scale_init=scale_init, name=name)


def rotary(
  x_BTHC: Float[Array, "B T H C"], positions_BT: TokensBT, theta: float
) -> Float[Array, "B T H C"]:
  """Rotary positions (arXiv 2104.09864): rotates pairs (i, i + C/2) by position · θ^(−2i/C).

  Phases are float32 whatever the dtype of x: in bfloat16 they would be off by 0.4 rad at
  position 1023.

  Args:
    x_BTHC: queries or keys; the head width C is even.
    positions_BT: int32 position of each token in its document.
    theta: base of the wavelengths.

  Returns:
    The rotated array, in the dtype of x.
  """
  half = x_BTHC.shape[-1] // 2
  frequency = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
  phase = positions_BT[..., None, None].astype(jnp.float32) * frequency[None, None, None]
  sin, cos = jnp.sin(phase), jnp.cos(phase)
  first, second = jnp.split(x_BTHC.astype(jnp.float32), 2, axis=-1)
  rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
  return rotated.astype(x_BTHC.dtype)


def dropout(
  x: ActivationsBTD, rate: float, keys: Key[Array, " B"] | None, place: int
) -> ActivationsBTD:
  """Sets entries to zero with probability `rate` and scales the others by 1 / (1 − rate).

  Each row has a random key of its own, so a row's mask is the same in any batch, in any part of an
  accumulated batch, and on any number of devices.

  Args:
    x: activations.
    rate: in [0, 1).
    keys: one for each row of the batch; None returns x.
    place: number of this place in the network, so that no two share a mask.
  """
  if keys is None or not rate:
    return x

  def keep(key):
    return jax.random.bernoulli(jax.random.fold_in(key, place), 1 - rate, x.shape[1:])

  return jnp.where(jax.vmap(keep)(keys), x / (1 - rate), 0).astype(x.dtype)


class Attention(nn.Module):
  """Causal grouped-query self-attention within documents, rotary positions, no biases.

  A token attends to itself and the tokens before it that carry the same segment id.

  Attributes:
    form: see `ldm_jax.ops.attention.attention`.
  """

  heads: int
  kv_heads: int
  qk_norm: bool
  rope_theta: float
  dtype: Dtype
  form: str = "auto"

  @nn.compact
  def __call__(
    self,
    x: ActivationsBTD,
    positions: TokensBT,
    segment_ids: TokensBT,
    cache: tuple[KeyValues, Cache] | None = None,
  ) -> ActivationsBTD | tuple[ActivationsBTD, KeyValues]:
    """Maps [B, T, D] to [B, T, D].

    Args:
      x: activations.
      positions: of the tokens.
      segment_ids: of the tokens.
      cache: to decode, this attention's keys and values and the cache that they belong to.

    Returns:
      The output; with a cache also the keys and values with the tokens in them.
    """
    width = x.shape[-1]
    x = _enter(x)
    project = functools.partial(_head_projection, head_dim=width // self.heads, dtype=self.dtype)
    q = project(self.heads, "heads", name="query")(x)
    k = project(self.kv_heads, "kv_heads", name="key")(x)
    v = project(self.kv_heads, "kv_heads", name="value")(x)
    if self.qk_norm:
      q, k = rms_norm(self.dtype, "query_norm")(q), rms_norm(self.dtype, "key_norm")(k)
    q, k = (rotary(x, positions, self.rope_theta) for x in (q, k))
    q = constrain(q, "batch", "sequence", "heads", "head_dim")
    k, v = (constrain(x, "batch", "sequence", "kv_heads", "head_dim") for x in (k, v))
    if cache is None:
      mixed = attention(q, k, v, segment_ids, self.form)
    else:
      mixed, layer = attend(*cache, q, k, v, segment_ids)
    out = nn.DenseGeneral(
      width,
      axis=(-2, -1),
      use_bias=False,
      dtype=self.dtype,
      kernel_init=partitioned(_init, "heads", "head_dim", "embed"),
      name="out",
    )
    v = _leave(out(mixed))
    return v if cache is None else (v, layer)


def _head_projection(heads, axis, head_dim, dtype, name):
  return nn.DenseGeneral(
    (heads, head_dim),
    use_bias=False,
    dtype=dtype,
    kernel_init=partitioned(_init, "embed", axis, "head_dim"),
    name=name,
  )


class SwiGLU(nn.Module):
  """Gated MLP (arXiv 2002.05202): W_out (silu(W_gate x) · W_up x), no biases."""

  hidden: int
  dtype: Dtype

  @nn.compact
  def __call__(self, x: ActivationsBTD) -> ActivationsBTD:
    """Maps [B, T, D] to [B, T, D]."""
    x = _enter(x)
    up_init = partitioned(_init, "embed", "mlp")
    dense = functools.partial(nn.Dense, use_bias=False, dtype=self.dtype)
    gate = dense(self.hidden, kernel_init=up_init, name="gate")(x)
    up = dense(self.hidden, kernel_init=up_init, name="up")(x)
    hidden = constrain(nn.silu(gate) * up, "batch", "sequence", "mlp")
    out = dense(x.shape[-1], kernel_init=partitioned(_init, "mlp", "embed"), name="out")(hidden)
    return _leave(out)


class Embedder(nn.Module):
  """Token embedding and output head over a vocabulary padded to a multiple of 128.

  Logits of the padding ids are −1e9, so they have probability 0 and can never be sampled.
  """

  vocab_size: int
  padded_vocab_size: int
  width: int
  tied: bool
  dtype: Dtype

  def setup(self):
    """Declares the embedding, and a head of its own unless tied."""
    shape = (self.padded_vocab_size, self.width)
    self.embedding = self.param("embedding", partitioned(_init, None, "stream_embed"), shape)
    if not self.tied:
      self.head = self.param("head_kernel", partitioned(_init, "embed", "vocab"), shape[::-1])

  def encode(self, tokens: TokensBT) -> ActivationsBTD:
    """Looks tokens up: int [B, T] -> [B, T, D] in `dtype`."""
    # Gather, then cast: the gradient sums over a token's occurrences, which bfloat16 would stall at
    # 256 of them.
    table = constrain(self.embedding, None, "activation_embed")
    x = jnp.take(table, tokens, axis=0).astype(self.dtype)
    return constrain(x, "batch", "sequence", "activation_embed")

  def decode(self, x: ActivationsBTD) -> Float[Array, "B T padded_vocab_size"]:
    """Logits in float32, summed in float32, padding ids masked."""
    x = _enter(x)
    kernel = self.embedding.T if self.tied else self.head
    logits = jnp.einsum(
      "btd,dv->btv", x, kernel.astype(self.dtype), preferred_element_type=jnp.float32
    )
    logits = constrain(logits, "batch", "sequence", "activation_vocab")
    real = jnp.arange(self.padded_vocab_size) < self.vocab_size
    return jnp.where(real[None, None], logits, -1e9)
