"""Sampling text from a model."""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from ldm_jax.data.tokenizer import Tokenizer
from ldm_jax.model import TransformerLM
from ldm_jax.typing import PyTree


def sample(
  model: TransformerLM,
  params: PyTree,
  tokenizer: Tokenizer,
  prompt: str,
  length: int,
  temperature: float = 0.8,
  seed: int = 0,
) -> str:
  """Continues a prompt by up to `length` tokens, as the start of a new document.

  Every token costs a forward pass over the whole text, so this is for short samples.  The length
  of a text is rarely a multiple of 128: a model with attention form "splash" takes "auto" here.

  Args:
    model: the language model.
    params: its parameters.
    tokenizer: for prompt and text.
    prompt: text to continue; may be empty.
    length: tokens to add; fewer if the document ends.
    temperature: 0 picks the most likely token.
    seed: of the random choices.

  Returns:
    Prompt and continuation.
  """
  ids = [tokenizer.boundary, *tokenizer.encode(prompt).tolist()]
  start = len(ids)
  if model.config.attention == "splash":
    model = model.clone(config=dataclasses.replace(model.config, attention="auto"))
  buffer = jnp.zeros((1, start + length), jnp.int32).at[0, :start].set(jnp.array(ids))
  out = _extend(
    model, params, buffer, start, tokenizer.vocab_size, temperature, jax.random.key(seed)
  )
  text = jax.device_get(out)[0, 1:].tolist()
  end = text.index(tokenizer.boundary) if tokenizer.boundary in text else len(text)
  return tokenizer.decode(text[:end])


@functools.partial(jax.jit, static_argnames=("model", "start", "ids", "temperature"))
def _extend(model, params, buffer, start, ids, temperature, key):
  def add_token(position, tokens):
    logits = model.apply({"params": params}, tokens)[0, position - 1, :ids]
    if temperature == 0:
      token = jnp.argmax(logits)
    else:
      token = jax.random.categorical(jax.random.fold_in(key, position), logits / temperature)
    return tokens.at[0, position].set(token)

  return jax.lax.fori_loop(start, buffer.shape[1], add_token, buffer)
