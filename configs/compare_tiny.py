"""Five depth mixers on a deep, narrow byte model: 12 blocks of width 64, 0.5M tokens a run.

python -m ldm_jax.compare --config configs/compare_tiny.py --out runs/compare_tiny

Depth mixers differ in what crosses layers, so the model has more layers than its size asks for.
"""

import dataclasses

from ldm_jax import Config, MixerConfig, ModelConfig
from ldm_jax.compare import Comparison
from ldm_jax.config import DataConfig, OptimizerConfig, TrainConfig


def get_comparison() -> Comparison:
  """The plain residual stream, both readouts of the depth memory, and its rivals: 20 runs."""
  ldm = MixerConfig(kind="ldm", rule="rls", groups=4, key_dim=8, latent_dim=32, gain_init=1.0)
  return Comparison(
    base=Config(
      model=ModelConfig(width=64, blocks=12, heads=4, mlp_width=176, vocab_size=257),
      data=DataConfig(source="stdlib", sequence_length=128, batch_size=8),
      optimizer=OptimizerConfig(warmup_steps=50, weight_decay=0.1),
      train=TrainConfig(
        steps=500,
        log_every=25,
        eval_every=50,
        eval_batches=32,
        checkpoint_every=250,
        keep=1,
        sample_tokens=0,
      ),
    ),
    mixers={
      "preln": MixerConfig(kind="preln"),
      "ldm": ldm,
      "ldm_memory_only": dataclasses.replace(
        ldm, readout="memory_only", write_embedding=True, key_bias_init=1.0
      ),
      "mhc": MixerConfig(kind="mhc", streams=4),
      "attnres": MixerConfig(kind="attnres", block_size=4),
    },
    seeds=(0, 1),
    learning_rates=(5e-3, 1e-2),
  )
