"""A run's model for EleutherAI's LM Evaluation Harness, as model "ldm_jax".

    pip install -e '.[lm-eval]'
    python -m ldm_jax.lm_eval_adapter run --model ldm_jax --model_args workdir=runs/ldm_tiny \\
      --tasks lambada_openai

This is the harness's own command with one more model; see `python -m lm_eval --help`.  --model_args
takes workdir, step, best, data and batch_size.  In Python, `import ldm_jax.lm_eval_adapter`
registers the model for `lm_eval.simple_evaluate(model="ldm_jax", ...)`.

A context is the start of a new document, after the id between documents, as in training.  What does
not fit into the context of the model loses its beginning, and the harness's own class splits texts
into tokens: as a whole, so that a continuation need not begin with a token of its own.
"""

import logging
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from lm_eval.__main__ import cli_evaluate
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from ldm_jax.command_line import run_command
from ldm_jax.data import Batch
from ldm_jax.decoding import Sampling, text_decoder
from ldm_jax.errors import InputError
from ldm_jax.scoring import Scorer
from ldm_jax.sharding import parts_of
from ldm_jax.trained import load_run_config, load_trained, run_tokenizer

_log = logging.getLogger(__name__)
_NEW_TOKENS = 256  # where a task does not say, as in the harness's own models
_STRIDE = 16  # tokens between two looks for a string that ends a text


@register_model("ldm_jax")
class LdmJaxLM(TemplateLM):
  """The model of a run."""

  def __init__(
    self,
    workdir: str = "runs/ldm_tiny",
    step: int | None = None,
    best: bool = False,
    data: str | None = None,
    batch_size: int | str = 8,
    max_length: int | None = None,
    device: str | None = None,
    **unknown: Any,
  ):
    """Loads a checkpoint on all devices.

    Args:
      workdir: of the run, or an export.
      step: which checkpoint; None for the newest.
      best: the state of the lowest held-out loss instead.
      data: the prepared data of the run, if the folder has moved.
      batch_size: texts in a batch; "auto" is 8.
      max_length: the context; at most `data.sequence_length`, the default.
      device: JAX chooses.
      **unknown: refused.

    Raises:
      InputError: for arguments that it does not know, and as `load_trained`.
    """
    super().__init__()
    del device
    if unknown:
      raise InputError(f"--model_args {', '.join(unknown)}: not known; see ldm_jax.lm_eval_adapter")
    config = load_run_config(workdir, data)
    self.run_tokenizer = run_tokenizer(workdir, config)
    trained = load_trained(workdir, step, "best" if best else "checkpoints")
    self.max_length = config.data.sequence_length if max_length is None else int(max_length)
    if not 1 <= self.max_length <= config.data.sequence_length:
      raise InputError(
        f"max_length={max_length}: give 1 to {config.data.sequence_length}, the run's context"
      )
    self.scorer = Scorer(trained.model, trained.params, trained.mesh)
    self.decoder = text_decoder(
      trained.model, trained.params, self.run_tokenizer, config.data.sequence_length
    )
    rows = 8 if str(batch_size).startswith("auto") else int(batch_size)
    parts = parts_of(trained.mesh, "batch")
    self.rows = parts * math.ceil(rows / parts)

  @property
  def eot_token_id(self) -> int:
    """The id between documents."""
    return self.run_tokenizer.boundary

  @property
  def tokenizer_name(self) -> str:
    """Tells the harness's caches of requests from those of other tokenizers."""
    return f"ldm_jax-{self.run_tokenizer.kind}-{self.run_tokenizer.sha256}"

  def tok_encode(
    self, string: str, add_special_tokens: bool | None = None, **kwargs: Any
  ) -> list[int]:
    """Ids of a text, without any special ones."""
    del add_special_tokens, kwargs
    return np.asarray(self.run_tokenizer.encode(string)).tolist()

  def _encode_pair(self, context, continuation):
    """A context is the start of a document."""
    context, continuation = super()._encode_pair(context, continuation)
    return [self.eot_token_id, *context], continuation

  def _loglikelihood_tokens(self, requests, disable_tqdm=False, **kwargs):
    """Log-likelihood of continuations, and whether each token of them is the most likely one."""
    del disable_tqdm, kwargs
    pairs = [(context, continuation) for _, context, continuation in requests]
    results = self._score(pairs)
    for (texts, _, _), result in zip(requests, results, strict=True):
      if texts is not None:
        self.cache_hook.add_partial("loglikelihood", texts, result)
    return results

  def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False):
    """Log-likelihood of whole texts, cut into pieces that each fill the context."""
    del disable_tqdm
    results = []
    for request in requests:
      (text,) = request.args
      windows = get_rolling_token_windows(
        self.tok_encode(text), self.eot_token_id, self.max_length, context_len=1
      )
      scores = self._score([make_disjoint_window(window) for window in windows])
      results.append(math.fsum(nats for nats, _ in scores))
      self.cache_hook.add_partial("loglikelihood_rolling", (text,), results[-1])
    return results

  def _score(self, pairs):
    """(log-likelihood, greedy) of each (context, continuation); batches are of like lengths."""
    results = [(0.0, True)] * len(pairs)
    order = sorted(
      (number for number, pair in enumerate(pairs) if pair[1]),
      key=lambda number: -sum(map(len, pairs[number])),
    )
    for start in range(0, len(order), self.rows):
      numbers = order[start : start + self.rows]
      batch = self._batch([pairs[number] for number in numbers])
      nats, greedy = self.scorer.scores(batch)
      for row, number in enumerate(numbers):
        mask = batch.loss_mask[row]
        results[number] = (
          -float(np.sum(nats[row][mask], dtype=float)),
          bool(greedy[row][mask].all()),
        )
    return results

  def _batch(self, pairs):
    """Texts as rows of a batch, padded on the right; the losses of the continuations count."""
    shape = (self.rows, self._length(max(sum(map(len, pair)) - 1 for pair in pairs)))
    tokens, targets, segments = (np.zeros(shape, np.int32) for _ in range(3))
    mask = np.zeros(shape, bool)
    for row, (context, continuation) in enumerate(pairs):
      if len(continuation) > self.max_length:
        _log.warning("a continuation of %d tokens loses its beginning", len(continuation))
      ids = [*context, *continuation][-self.max_length - 1 :]
      size = len(ids) - 1
      tokens[row, :size], targets[row, :size], segments[row, :size] = ids[:-1], ids[1:], 1
      mask[row, max(0, size - len(continuation)) : size] = True
    positions = np.broadcast_to(np.arange(shape[1], dtype=np.int32), shape)
    return Batch(tokens, targets, positions, segments, mask)

  def _length(self, size):
    """Row lengths are powers of two, so that few programs are compiled."""
    return min(self.max_length, max(16, 2 ** math.ceil(math.log2(max(size, 1)))))

  def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
    """Continues contexts up to one of their `until` strings, the end of the document, or a length.

    Of `gen_kwargs` it knows until, max_gen_toks, do_sample, temperature, top_k and top_p; without
    do_sample or a temperature it takes the most likely tokens.
    """
    del disable_tqdm
    results = [""] * len(requests)
    groups: dict[Any, list[int]] = {}
    for number, request in enumerate(requests):
      groups.setdefault(_settings(request.args[1]), []).append(number)
    for settings, numbers in groups.items():
      for start in range(0, len(numbers), self.rows):
        part = numbers[start : start + self.rows]
        texts = self._generate([requests[number].args[0] for number in part], *settings)
        for number, text in zip(part, texts, strict=True):
          results[number] = text
          self.cache_hook.add_partial("generate_until", requests[number].args, text)
    return results

  def _generate(self, contexts, until, count, sampling):
    count = min(count, self.max_length - 1)
    room = self.max_length - count
    prompts = [
      [self.eot_token_id, *ids[len(ids) - min(room, len(ids)) :]]
      for ids in map(self.tok_encode, contexts)
    ]
    for look in self.decoder.stream(prompts, count, sampling, stride=_STRIDE):
      texts = [self.run_tokenizer.decode(ids) for ids in look.ids]
      ends = [_end(text, until) for text in texts]
      if all(
        done or end < len(text) for done, end, text in zip(look.done, ends, texts, strict=True)
      ):
        break
    return [text[:end] for text, end in zip(texts, ends, strict=True)]


def _end(text, until):
  """Where the first of the strings that end a text begins."""
  return min((at for at in map(text.find, until) if at >= 0), default=len(text))


def _settings(given):
  """(until, max_gen_toks, sampling) of a request's arguments."""
  given = dict(given)
  until = given.pop("until", None) or ()
  until = (until,) if isinstance(until, str) else tuple(until)
  count = int(given.pop("max_gen_toks", _NEW_TOKENS))
  temperature = float(given.pop("temperature", 0.0) or 0.0)
  if given.pop("do_sample", None) is False:
    temperature = 0.0
  top_k, top_p = given.pop("top_k", None), given.pop("top_p", None)
  if given:
    _log.warning("generation arguments that are not known have no effect: %s", ", ".join(given))
  return until, count, Sampling(temperature, top_k, top_p)


def main() -> int:
  """The harness's own command line."""
  cli_evaluate()
  return 0


if __name__ == "__main__":
  run_command(main)
