"""419M parameters (411M without the mixers), 24 blocks of width 1024, 50B tokens in all.

    python train.py --config configs/ldm_400m.py --workdir RUN

A step is 1,048,576 tokens.  The vocabulary is that of the GPT-NeoX tokenizer padded to 50,304; give
data prepared with it by `--data.source prepared --data.path DIR`.  Without, the run takes the byte
text of the standard library, which uses 257 of those ids.
"""

from ldm_jax import Config, MixerConfig, ModelConfig
from ldm_jax.config import DataConfig, OptimizerConfig, TrainConfig


def get_config() -> Config:
  """Rate 1e-3 is the one the Linear Depth Memory authors report selecting at this size."""
  return Config(
    model=ModelConfig(
      width=1024,
      blocks=24,
      heads=16,
      mlp_width=2816,
      vocab_size=50_304,
      mixer=MixerConfig(
        kind="ldm", rule="rls", groups=16, key_dim=8, gain_init=1.0, memory_dtype="bfloat16"
      ),
    ),
    data=DataConfig(sequence_length=2048, batch_size=512),
    optimizer=OptimizerConfig(learning_rate=1e-3, warmup_steps=1000),
    train=TrainConfig(
      steps=47_684,
      eval_every=1000,
      checkpoint_every=1000,
      compute_dtype="bfloat16",
      remat="full",
    ),
  )
