"""Work of a training step in FLOPs, and the share of the hardware's peak that it reaches (MFU).

A FLOP is a multiplication or an addition, so a multiply-add is two.  Only matrix products count, as
is usual: norms, activations, softmax, rotary positions and the optimizer are left out.
"""

from typing import Any

import jax
from jax.sharding import Mesh

from ldm_jax.config import MixerConfig, ModelConfig
from ldm_jax.tpu import chip_of


def model_flops_per_token(model: ModelConfig, sequence_length: int) -> int:
  """FLOPs per token of one training step of the transformer, its depth mixers left out.

  Forward and backward are three times the forward: the backward pass has two products of the same
  size for each one of the forward pass.  Nothing is added for recomputation (`train.remat`).

      FLOPs = 6 N + 12 · blocks · D · T
      N = blocks · (2 D² + 2 D J C + 3 D F) + D · vocab_size

  N counts the weights that a token is multiplied with: queries, keys, values, output projection,
  SwiGLU and the head, tied or not; the embedding is a lookup.  The vocabulary is the real one, for
  the padding is no useful work.  The second term is q kᵀ and its product with v over all T
  positions: neither the causal mask nor document boundaries are taken off.  That is the formula of
  PaLM (arXiv 2204.02311, appendix B), with grouped keys and values.

  Mixers are left out so that MFU compares them: at equal MFU two mechanisms carry the same
  transformer over the same number of tokens in the same time, and what a mixer costs shows as a
  lower MFU.  `mixer_flops_per_token` has what they add.

  Args:
    model: shape of the network.
    sequence_length: T.
  """
  width, blocks = model.width, model.blocks
  kv_width = (model.kv_heads or model.heads) * (width // model.heads)
  block = 2 * width * width + 2 * width * kv_width + 3 * width * model.mlp_width
  weights = blocks * block + width * model.vocab_size
  return 6 * weights + 12 * blocks * width * sequence_length


def mixer_flops_per_token(model: ModelConfig) -> int:
  """FLOPs per token of one training step in the depth mixers, three times the forward pass.

  Counted are products with control weights, reads and writes; with multiply-adds per sublayer

      ldm      read   D R + R G K + R G + D K            latent, query, gate, M q
               write  D R + R G K + R G + 2 D K + 2 G K² latent, key, importance, M k̄ and u κᵀ, P k̄
                                                         and κ k̄ᵀ P; less for the other rules
      attnres  read   2 S D                              scores and mean of S sources
      hc       read   N D (+ N D)                        A_mᵀ X (and its dynamic part)
               write  N² D + N D (+ N D (N + 1))         A_rᵀ X + Bᵀ v (and their dynamic part)
      mhc      read   N D + N² D                         H_pre X, u φ_pre
               write  N² D + N D + N³ D + N² D           H_res X + H_postᵀ v, u φ_res, u φ_post

  and 0 for preln.  Of the depth memory that is the recursion, whichever form computes it.  What the
  first and last sublayers do without is left out.  Sinkhorn's iterations are not products.
  """
  counts = {"ldm": _ldm, "attnres": _attnres, "hc": _hc, "mhc": _mhc}
  count = counts.get(model.mixer.kind)
  return 6 * count(model.mixer, model.width, model.sublayers) if count else 0


def peak_flops(device: jax.Device | Any) -> float | None:
  """Dense bfloat16 peak of a device in FLOP/s; None where it is not known.

  A v4 or v5p chip is one device of two cores, a TPU7x chip two devices of one.
  """
  chip, cores = chip_of(device), getattr(device, "num_cores", None)
  return chip.flops / chip.cores * cores if chip and cores else None


def mesh_peak_flops(mesh: Mesh) -> float | None:
  """Sum of `peak_flops` over a mesh; None if any device is unknown."""
  peaks = [peak_flops(device) for device in mesh.devices.flat]
  return None if None in peaks else sum(peaks)


def mfu(tokens_per_second: float, flops_per_token: int, peak: float | None) -> float | None:
  """Model FLOPs utilisation: the share of the bfloat16 peak that useful work reaches.

  Args:
    tokens_per_second: of finished work.
    flops_per_token: `model_flops_per_token`.
    peak: FLOP/s of all devices that share the work; None if unknown.

  Returns:
    A fraction, or None without a peak.  A run in float32 is held against the bfloat16 peak too.
  """
  return None if peak is None else tokens_per_second * flops_per_token / peak


def _ldm(mixer: MixerConfig, width, sublayers):
  latent, groups, keys = mixer.latent_dim, mixer.groups, mixer.key_dim
  gates = latent * groups
  memory, covariance = width * keys, groups * keys * keys
  read = width * latent + latent * groups * keys + memory
  read += gates if mixer.readout == "add" else 0
  controls = width * latent + latent * (1 if mixer.shared_key else groups) * keys
  controls += gates if mixer.rule == "delta" or (mixer.rule == "rls" and mixer.importance) else 0
  record = {"rls": 2 * memory + 2 * covariance, "delta": 2 * memory, "outer": memory}[mixer.rule]
  reads = sublayers + 1 - mixer.write_every  # the head reads too
  writes = sublayers // mixer.write_every
  return reads * read + writes * (controls + record) + mixer.write_embedding * record


def _attnres(mixer: MixerConfig, width, sublayers):
  size = mixer.block_size
  sources = (1 + index // size + (index % size > 0) for index in range(1, sublayers + 1))
  return 2 * width * sum(sources)


def _hc(mixer: MixerConfig, width, sublayers):
  count = mixer.streams
  dynamic = count * width if mixer.dynamic else 0
  read = count * width + dynamic if count > 1 else 0
  write = (count + 1) * (count * width + dynamic)
  return (sublayers - 1) * read + sublayers * write


def _mhc(mixer: MixerConfig, width, sublayers):
  count = mixer.streams
  projection = count * width  # for each number that u φ gives
  read = count * width + count * projection if count > 1 else 0
  write = count * width + count * projection
  mixing = count * count * width + count * count * projection if count > 1 else 0
  return (sublayers - 1) * read + sublayers * write + max(sublayers - 2, 0) * mixing
