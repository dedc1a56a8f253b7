"""Inside the linear depth memory: what reads draw from it, its keys, and how well it recalls.

Write j holds source `writes[j]`, or, with `write_every` above 1, the sum of the sources up to it.
A read at sublayer l looks at all writes before it.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from ldm_jax.analysis.replay import Moment, Sources
from ldm_jax.ops import depth_memory as dm
from ldm_jax.ops.depth_memory.natural import Natural
from ldm_jax.ops.products import exact_einsum
from ldm_jax.typing import AnyArray


class Memory(NamedTuple):
  """Reads l = 0 … L (the head's last), writes j = 0 … W−1, groups G.

  Means over tokens unless said otherwise.  NaN where there is nothing: a read before the first
  write, a write after the read, a number that the rule does not have.

  weights: w of M_l q = Σ_j w[l, j] v_j [R, W, G]; for the RLS rule Γ(l, j) ω_j k_jᵀ P_l q.
  magnitudes: |w| [R, W, G].
  gain: learned, of each read [R, G].  gate: what the token multiplies it with [R, G].
  forgetting: λ of each write, learned [W, G].
  strength: of each write [W, G]: the importance ω of the RLS rule, the step size β of the delta
    rule.  strength_deviation: its standard deviation over tokens.
  key_cosine: cosine of the keys of two writes of a token [W, W, G].
  key_overlap: its absolute value [W, W, G].
  key_rank: effective rank of the keys before each read, Σ_j Γ(l, j) ω_j k_j k_jᵀ [R, G]; Γ = ω = 1
    for the rules without.
  covariance_rank: effective rank of P as each read finds it [R, G].
  condition_number: largest over smallest eigenvalue of P, median over tokens [R, G].
  recall_error: how far M_l k_j is from v_j, against the length of v_j [R, W, G].
  """

  weights: Any
  magnitudes: Any
  gain: Any
  gate: Any
  forgetting: Any
  strength: Any
  strength_deviation: Any
  key_cosine: Any
  key_overlap: Any
  key_rank: Any
  covariance_rank: Any
  condition_number: Any
  recall_error: Any


class Write(NamedTuple):
  """One record: its last source, key [n, G, K], value [n, G, V], ω or β [n, G], λ [G].

  Strength and forgetting are None where the rule has none.
  """

  source: int
  key: jax.Array
  value: jax.Array
  strength: jax.Array | None
  forgetting: jax.Array | None


def effective_rank(matrix: Float[AnyArray, "*batch K K"]) -> Float[np.ndarray, "*batch"]:
  """exp of the entropy of p = eigenvalues / their sum: 1 for one direction, K for K equal ones.

  Source: Roy and Vetterli, The effective rank, 2007.  0 for a matrix of zeros.

  Args:
    matrix: symmetric, without eigenvalues below 0.
  """
  eigenvalues = np.maximum(np.linalg.eigvalsh(matrix), 0.0)
  total = np.sum(eigenvalues, axis=-1, keepdims=True)
  p = eigenvalues / np.where(total > 0, total, 1.0)
  entropy = -np.sum(p * np.log(np.where(p > 0, p, 1.0)), axis=-1)
  return np.where(total[..., 0] > 0, np.exp(entropy), 0.0)


def condition_number(matrix: Float[AnyArray, "*batch K K"]) -> Float[np.ndarray, "*batch"]:
  """Largest over smallest eigenvalue of a symmetric matrix; infinite if one is not positive."""
  eigenvalues = np.linalg.eigvalsh(matrix)
  smallest, largest = eigenvalues[..., 0], eigenvalues[..., -1]
  return np.where(smallest > 0, largest / np.where(smallest > 0, smallest, 1.0), np.inf)


def key_cosines(keys: Float[Array, "W *batch K"]) -> Float[Array, "W W *batch"]:
  """Cosines between all pairs of keys; 0 with a zero key."""
  lengths = jnp.linalg.norm(keys, axis=-1, keepdims=True)
  unit = keys / jnp.where(lengths > 0, lengths, 1.0)
  return exact_einsum("i...k,j...k->ij...", unit, unit)


def recall_error(
  M: Float[Array, "*batch V K"], key: Float[Array, "*batch K"], value: Float[Array, "*batch V"]
) -> Float[Array, "*batch"]:
  """‖M k − v‖ / ‖v‖.

  The RLS rule stores k̄ = √ω k and v̄ = √ω v; ‖M k̄ − v̄‖ / ‖v̄‖ is the same number, since √ω cancels.
  """
  missed = jnp.linalg.norm(dm.read(M, key) - value, axis=-1)
  return missed / jnp.maximum(jnp.linalg.norm(value, axis=-1), jnp.finfo(jnp.float32).tiny)


class MemoryMeasurement:
  """Sums up what a replay of `LinearDepthMemory` mixers goes through, read after read.

  It keeps keys and values of the writes, so a replay need not be kept whole.
  """

  def __init__(self, sources: Sources, write_sources: Sequence[int]):
    """Starts before the first read.

    Args:
      sources: what the replay draws on [S, n, D].
      write_sources: the last source in each record.
    """
    self._sources, self._numbers = sources.astype(jnp.float32), write_sources
    self._writes, self._gram, self._reads = [], None, []

  def add(self, moment: Moment) -> None:
    """Takes the next read, and the write before it."""
    mixer = moment.mixer
    if moment.index == 0 and mixer.write_embedding:
      self._write(mixer, 0, *_first_controls(mixer, self._sources.shape[1]))
    for key, strength, forgetting in moment.written:
      strength = None if strength is None else strength[0]
      self._write(mixer, moment.index, key[0], strength, forgetting)
    self._reads.append(self._read(moment))

  def result(self) -> Memory:
    """All that was measured, as NumPy arrays."""
    keys = jnp.stack([write.key for write in self._writes])
    cosines = key_cosines(keys)
    missing = np.full(keys.shape[2], np.nan)

    def by_write(statistic, name):
      found = [getattr(write, name) for write in self._writes]
      return np.stack([missing if x is None else np.asarray(statistic(x)) for x in found])

    reads = {name: np.stack([read[name] for read in self._reads]) for name in self._reads[0]}
    return Memory(
      **reads,
      forgetting=by_write(lambda x: x, "forgetting"),
      strength=by_write(lambda x: jnp.mean(x, axis=0), "strength"),
      strength_deviation=by_write(lambda x: jnp.std(x, axis=0), "strength"),
      key_cosine=np.asarray(jnp.mean(cosines, axis=2)),
      key_overlap=np.asarray(jnp.mean(jnp.abs(cosines), axis=2)),
    )

  def _write(self, mixer, source, key, strength, forgetting):
    first = source - mixer.write_every + 1 if source else 0
    members = self._sources[first : source + 1]
    value = jnp.sum(members, axis=0).reshape(len(key), mixer.groups, -1)
    self._writes.append(Write(source, key, value, strength, forgetting))
    outer = key[..., :, None] * key[..., None, :]
    if mixer.rule == "rls":
      outer = strength[..., None, None] * outer
      if self._gram is not None:
        self._gram = forgetting[None, :, None, None] * self._gram
    self._gram = outer if self._gram is None else self._gram + outer

  def _read(self, moment):
    """What one read says, NaN where it says nothing."""
    groups, seen = moment.mixer.groups, len(self._writes)
    row = {
      name: np.full((len(self._numbers), groups), np.nan)
      for name in ("weights", "magnitudes", "recall_error")
    } | {
      name: np.full(groups, np.nan)
      for name in ("gain", "gate", "key_rank", "covariance_rank", "condition_number")
    }
    if moment.asked:
      ((query, scale),) = moment.asked
      w = dm.read(moment.coefficients.M, query)[0]  # [n, G, S]
      w = jnp.stack([w[..., write.source] for write in self._writes])
      row["weights"][:seen] = jnp.mean(w, axis=1)
      row["magnitudes"][:seen] = jnp.mean(jnp.abs(w), axis=1)
      if scale is not None:
        row["gain"] = np.asarray(moment.params["read_controls"]["gain"])
        row["gate"] = np.asarray(jnp.mean(_gate(moment), axis=(0, 1)))
    if moment.streams.P is not None:
      row["covariance_rank"] = np.mean(effective_rank(moment.streams.P[0]), axis=0)
      row["condition_number"] = np.median(condition_number(moment.streams.P[0]), axis=0)
    if seen:
      row["key_rank"] = np.mean(effective_rank(self._gram), axis=0)
      M = moment.streams.memory_matrix()[0]
      errors = [jnp.mean(recall_error(M, write.key, write.value), axis=0) for write in self._writes]
      row["recall_error"][:seen] = jnp.stack(errors)
    return row


def _first_controls(mixer, tokens):
  """Key, ω (or β) and λ of the embedding as a record; None where the rule has none."""
  key = Natural(mixer.groups, mixer.key_dim).constant_key((1, tokens))[0]
  strength = None if mixer.rule == "outer" else jnp.ones(key.shape[:-1])
  return key, strength, jnp.ones(mixer.groups) if mixer.rule == "rls" else None


def _gate(moment):
  """The gate of a read [1, n, G]: its scale with a gain of 1, since the true gain may be 0."""
  controls = moment.params["read_controls"]
  controls = {**controls, "gain": jnp.ones_like(controls["gain"])}
  return moment.mixer.apply(
    {"params": {**moment.params, "read_controls": controls}},
    moment.streams.x,
    method=lambda mixer, x: mixer.read_controls(x)[1],
  )
