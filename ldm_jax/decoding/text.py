"""Texts from a model: prompts in, continuations out, all at once or as they come."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from ldm_jax.data.tokenizer import Tokenizer
from ldm_jax.decoding.decoder import Decoder
from ldm_jax.decoding.sampling import Sampling
from ldm_jax.model import TransformerLM
from ldm_jax.typing import PyTree

# A character of UTF-8 that is not complete decodes to at most so many replacement characters.
_LONGEST_INCOMPLETE = 3


class Continuation(NamedTuple):
  """What a model makes of a prompt.

  prompt: as it was given.
  text: what comes after it.
  ids: the new token ids.
  ended: whether the document ended; otherwise there was no room for more.
  """

  prompt: str
  text: str
  ids: list[int]
  ended: bool


def text_decoder(
  model: TransformerLM, params: PyTree, tokenizer: Tokenizer, context: int
) -> Decoder:
  """A decoder that ends at the end of a document and only makes ids that the tokenizer has."""
  return Decoder(model, params, context, tokenizer.boundary, tokenizer.known_ids())


def prompt_ids(tokenizer: Tokenizer, prompt: str) -> list[int]:
  """A text as the start of a new document: the id between documents, then its own."""
  return [tokenizer.boundary, *np.asarray(tokenizer.encode(prompt)).tolist()]


def continue_texts(
  decoder: Decoder,
  tokenizer: Tokenizer,
  prompts: Sequence[str],
  max_new_tokens: int,
  sampling: Sampling = Sampling(),  # noqa: B008
  seed: int = 0,
) -> list[Continuation]:
  """Continues each prompt, all in one batch, as the start of a new document.

  Args:
    decoder: see `text_decoder`.
    tokenizer: of the model.
    prompts: texts; an empty one is a new document without any text yet.
    max_new_tokens: at least 1; fewer come where a document ends.
    sampling: how tokens are chosen.
    seed: of the random choices.  A continuation depends on its prompt, the seed and its place among
      the prompts, not on the other prompts.

  Raises:
    InputError: before any work, for a prompt that does not fit.
  """
  *_, continuations = stream_texts(decoder, tokenizer, prompts, max_new_tokens, sampling, seed)
  return continuations


def stream_texts(
  decoder: Decoder,
  tokenizer: Tokenizer,
  prompts: Sequence[str],
  max_new_tokens: int,
  sampling: Sampling = Sampling(),  # noqa: B008
  seed: int = 0,
  stride: int | None = None,
) -> Iterator[list[Continuation]]:
  """As `continue_texts`, with a look every `stride` tokens.

  What is shown stays: a character of which only some bytes are there waits for the others, until
  the end of its text.
  """
  starts = [prompt_ids(tokenizer, prompt) for prompt in prompts]
  before = [tokenizer.decode(ids) for ids in starts]
  for look in decoder.stream(starts, max_new_tokens, sampling, seed, stride):
    rows = zip(prompts, starts, before, look.ids, look.done, strict=True)
    continuations = []
    for prompt, start, start_text, ids, ended in rows:
      text = _continuation(tokenizer, start, start_text, ids)
      if not ended and len(ids) < max_new_tokens:
        text = _settled(text)
      continuations.append(Continuation(prompt, text, ids, ended))
    yield continuations


def _continuation(tokenizer, start, start_text, new):
  """Text of the new ids as it stands after the prompt's: some tokenizers join with a space."""
  whole = tokenizer.decode([*start, *new])
  return whole[len(start_text) :] if whole.startswith(start_text) else tokenizer.decode(new)


def _settled(text):
  return text[: max(len(text.rstrip("\ufffd")), len(text) - _LONGEST_INCOMPLETE)]
