"""What a model gives the tokens of texts: losses token by token, and sums of them."""

import dataclasses
import functools
import math
from collections.abc import Iterable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ldm_jax.data.packing import Batch
from ldm_jax.model import TransformerLM, portable
from ldm_jax.training.evaluation import evaluate
from ldm_jax.training.step import LossSums, compiler_options, put_batch, token_losses
from ldm_jax.typing import PyTree


@dataclasses.dataclass(frozen=True)
class Scorer:
  """A model to score batches with; every batch shape is one program.

  Attributes:
    model: the network; in place of forms for TPUs it takes what can run.
    params: its parameters, on `mesh`.
    mesh: the devices, over which rows and positions of a batch must divide.
  """

  model: TransformerLM
  params: PyTree
  mesh: Mesh

  def scores(self, batch: Batch) -> tuple[np.ndarray, np.ndarray]:
    """The cross-entropy of each target in nats, float32 [B, T], and whether it is the most likely.

    What the loss mask leaves out has scores too, without meaning.
    """
    with jax.set_mesh(self.mesh):
      return jax.device_get(self._step(self.params, put_batch(self.mesh, batch)))

  @functools.cached_property
  def _step(self):
    model = portable(self.model)

    def step(params, batch):
      logits = model.apply({"params": params}, batch.tokens, batch.positions, batch.segment_ids)
      greedy = jnp.argmax(logits, axis=-1) == batch.targets
      return token_losses(logits, batch.targets)[0], greedy

    whole = NamedSharding(self.mesh, PartitionSpec())
    return jax.jit(step, out_shardings=whole, compiler_options=compiler_options(self.mesh))


@dataclasses.dataclass
class Tally:
  """Sums over the targets of batches, in float64.

  Attributes:
    boundary: the id between documents; None where there is none.
    position_nats: float64 [T], of the targets after so many tokens of their document in the row.
    position_tokens: int64 [T], how many there are.
    document_nats: of each document, for rows in the order of their stream.
    document_tokens: targets of each, the boundary after it included.
  """

  boundary: int | None
  position_nats: np.ndarray | None = None
  position_tokens: np.ndarray | None = None
  document_nats: list[float] = dataclasses.field(default_factory=list)
  document_tokens: list[int] = dataclasses.field(default_factory=list)

  def add(self, batch: Batch, nats: np.ndarray) -> None:
    """Counts the real targets of a batch, whose losses are nats [B, T]."""
    mask = batch.loss_mask
    nats, positions, length = nats[mask].astype(np.float64), batch.positions[mask], mask.shape[1]
    if self.position_nats is None:
      self.position_nats, self.position_tokens = np.zeros(length), np.zeros(length, np.int64)
    self.position_nats += np.bincount(positions, nats, length)
    self.position_tokens += np.bincount(positions, minlength=length)
    if self.boundary is not None:
      self._add_documents(batch.tokens[mask] == self.boundary, nats)

  def _add_documents(self, starts, nats):
    numbers = np.cumsum(starts) + len(self.document_nats) - 1
    missing = int(np.sum(starts))
    self.document_nats += [0.0] * missing
    self.document_tokens += [0] * missing
    sums, tokens = np.bincount(numbers, nats), np.bincount(numbers)
    for number in np.flatnonzero(tokens):
      self.document_nats[number] += float(sums[number])
      self.document_tokens[number] += int(tokens[number])


def score_batches(
  scorer: Scorer, batches: Iterable[Batch], boundary: int | None, of_bytes: bool, tally: Tally
) -> dict[str, float | int]:
  """Mean loss of all targets, see `training.evaluation.evaluate`, with its perplexity.

  Args:
    scorer: the model.
    batches: arrays [B, T].
    boundary: the id between documents.
    of_bytes: whether all other ids are bytes.
    tally: takes every batch.
  """

  def step(batch):
    nats, _ = scorer.scores(batch)
    tally.add(batch, nats)
    total = np.sum(nats, where=batch.loss_mask, dtype=np.float64)
    return LossSums(total, np.float64(0), np.sum(batch.loss_mask))

  result = evaluate(step, batches, boundary if of_bytes else None)
  return {**result, "perplexity": math.exp(min(result["loss"], 700))}
