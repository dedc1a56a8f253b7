"""Decoding: texts from a model, token by token, with a cache of keys and values.

from ldm_jax.decoding import Decoder, Sampling

ids = Decoder(model, params, context=256).generate([[256, 97]], max_new_tokens=20)
"""

from ldm_jax.decoding.decoder import Decoder, check_numbers
from ldm_jax.decoding.sampling import GREEDY, Sampling, sample_tokens
from ldm_jax.decoding.text import (
  Continuation,
  continue_texts,
  prompt_ids,
  stream_texts,
  text_decoder,
)

__all__ = [
  "GREEDY",
  "Continuation",
  "Decoder",
  "Sampling",
  "check_numbers",
  "continue_texts",
  "prompt_ids",
  "sample_tokens",
  "stream_texts",
  "text_decoder",
]
