"""The benchmark of train steps takes several configs against one baseline."""

import json
import sys

import pytest

from ldm_jax.benchmarks import steps
from ldm_jax.errors import InputError
from tests.rig import ROOT


def test_the_steps_command_takes_several_configs(monkeypatch, capsys):
  class Timer:
    temporary_bytes = 2**20

    def __init__(self, config):
      self.median = 0.5 if config.model.mixer.kind == "preln" else 1.0

    def measure(self):
      pass

  monkeypatch.setattr(steps, "StepTimer", Timer)
  configs = [str(ROOT / "configs" / f"{name}.py") for name in ("ldm_tiny", "ldm_400m")]
  monkeypatch.setattr(sys, "argv", ["steps", "--config", *configs, "--json"])
  assert steps.main() == 0
  result = json.loads(capsys.readouterr().out)
  assert result["ratios"] == {"preln_tiny": 1.0, "ldm_tiny": 2.0, "ldm_400m": 2.0}
  monkeypatch.setattr(sys, "argv", ["steps", "--config", configs[0], configs[0]])
  with pytest.raises(InputError, match="same name"):
    steps.main()
