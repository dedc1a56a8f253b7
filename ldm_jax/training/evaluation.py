"""Held-out loss: exact sums over real targets, whatever the batch shapes."""

import math
from collections.abc import Callable, Iterable

import jax
import numpy as np

from ldm_jax.data.packing import Batch
from ldm_jax.training.step import LossSums


def evaluate(
  eval_step: Callable[[Batch], LossSums],
  batches: Iterable[Batch],
  boundary: int | None,
  stop: object = False,
) -> dict[str, float | int] | None:
  """Mean loss over the real targets of all batches.

  Args:
    eval_step: loss sums of one batch, on the device.
    batches: arrays [B, T]; padding is told by their loss masks.
    boundary: the document-boundary id, which is a target but not a byte; None if tokens are not
      bytes.
    stop: becomes true when the evaluation should be given up.

  Returns:
    {"loss": nats per target, "tokens": real targets, "bits_per_byte": total loss over total bytes},
    the last one where tokens are bytes; or None if it was given up.
  """
  nats, tokens, text_bytes = 0.0, 0, 0
  for batch in batches:
    if stop:
      return None
    sums = jax.device_get(eval_step(batch))
    nats += float(sums.cross_entropy)
    tokens += int(sums.tokens)
    text_bytes += int(np.sum(batch.loss_mask & (batch.targets != boundary)))
  result = {"loss": nats / max(tokens, 1), "tokens": tokens}
  if boundary is not None:
    result["bits_per_byte"] = nats / max(text_bytes, 1) / math.log(2)
  return result
