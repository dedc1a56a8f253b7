"""Choosing the next token from logits."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key

from ldm_jax.errors import InputError

_LARGEST_TEMPERATURE = 1e30  # divided by infinity, ids that may not come out would be NaN


class Sampling(NamedTuple):
  """How a token is chosen; the numbers may be traced, what is None costs nothing.

  temperature: what logits are divided by; 0 takes the most likely token.
  top_k: keep only so many of the most likely tokens; None keeps all.
  top_p: then keep only the most likely tokens, as many as it takes to reach this probability, the
    one that reaches it included: never fewer than one; None keeps all.
  """

  temperature: Any = 1.0
  top_k: Any = None
  top_p: Any = None

  def checked(self) -> "Sampling":
    """The same settings.

    Raises:
      InputError: naming the option that is out of range.
    """
    if not 0 <= self.temperature <= _LARGEST_TEMPERATURE:
      raise InputError(
        f"--temperature {self.temperature}: give a number from 0, which takes the most likely "
        f"token, to {_LARGEST_TEMPERATURE:.0e}"
      )
    if self.top_k is not None and self.top_k < 1:
      raise InputError(f"--top-k {self.top_k}: keep at least 1 token, or leave it out to keep all")
    if self.top_p is not None and not 0 < self.top_p <= 1:
      raise InputError(f"--top-p {self.top_p}: give a probability above 0 and at most 1")
    return self

  def as_arrays(self) -> "Sampling":
    """The same as scalar arrays, which programs take as arguments: one for all values."""
    dtypes = Sampling(np.float32, np.int32, np.float32)
    top_k = self.top_k and min(self.top_k, np.iinfo(np.int32).max)
    pairs = zip(dtypes, self._replace(top_k=top_k), strict=True)
    return Sampling(*(None if value is None else dtype(value) for dtype, value in pairs))


GREEDY = Sampling(temperature=0.0)


def sample_tokens(
  logits_BV: Float[Array, "B vocab_size"],
  keys_B: Key[Array, " B"],
  sampling: Sampling,
  allowed_V: Bool[Array, " vocab_size"] | None = None,
) -> Int[Array, " B"]:
  """One token for each row, in float32: temperature first, then top-k, then top-p.

  Each row has a random key of its own, so its choice is the same in any batch.  Where probabilities
  are equal the lower id counts as more likely.

  Args:
    logits_BV: of the next token.
    keys_B: random keys.
    sampling: see `Sampling`.
    allowed_V: ids that may be chosen; all of them by default.

  Returns:
    int32 ids.
  """
  logits = logits_BV.astype(jnp.float32)
  if allowed_V is not None:
    logits = jnp.where(allowed_V[None], logits, -jnp.inf)
  temperature = jnp.asarray(sampling.temperature, jnp.float32)

  def draw():
    scaled = logits / temperature
    if sampling.top_k is not None or sampling.top_p is not None:
      scaled = jnp.where(_kept(scaled, sampling), scaled, -jnp.inf)
    return jax.vmap(jax.random.categorical)(keys_B, scaled).astype(jnp.int32)

  def most_likely():
    return jnp.argmax(logits, axis=-1).astype(jnp.int32)

  return jax.lax.cond(temperature > 0, draw, most_likely)


def _kept(logits, sampling):
  """Which ids top-k and then top-p keep, bool [B, vocab_size]."""
  order = jnp.argsort(-logits, axis=-1, stable=True)
  ordered = jnp.take_along_axis(logits, order, axis=-1)
  kept = jnp.ones(ordered.shape, bool)
  if sampling.top_k is not None:
    kept = (jnp.arange(ordered.shape[-1]) < sampling.top_k)[None] & kept
  if sampling.top_p is not None:
    share = jax.nn.softmax(jnp.where(kept, ordered, -jnp.inf), axis=-1)
    before = jnp.cumsum(share, axis=-1) - share
    # The first is kept whatever rounding says, and 1 keeps those whose share it rounds away.
    enough = (before < sampling.top_p) | (jnp.asarray(sampling.top_p) >= 1)
    kept = kept & enough.at[..., 0].set(True)
  return jnp.take_along_axis(kept, jnp.argsort(order, axis=-1), axis=-1)
