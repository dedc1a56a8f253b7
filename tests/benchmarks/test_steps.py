"""The benchmark of train steps takes configs, mixers and forms against one baseline."""

import json
import sys

import pytest

from ldm_jax.benchmarks import steps
from ldm_jax.errors import InputError
from tests.rig import ROOT


class Timer:
  """Half a second a step for PreLN, else one."""

  temporary_bytes = 2**20

  def __init__(self, config):
    self.median = 0.5 if config.model.mixer.kind == "preln" else 1.0
    CONFIGS.append(config)

  def measure(self):
    pass


CONFIGS = []


@pytest.fixture(autouse=True)
def _timer(monkeypatch):
  CONFIGS.clear()
  monkeypatch.setattr(steps, "StepTimer", Timer)


def test_the_steps_command_takes_mixers_and_forms(monkeypatch, capsys):
  def ratios(*arguments):
    monkeypatch.setattr(sys, "argv", ["steps", "--json", *arguments])
    assert steps.main() == 0
    return json.loads(capsys.readouterr().out)["ratios"]

  others = dict.fromkeys(("ldm", "attnres", "hc", "mhc"), 2.0)
  assert ratios() == {"preln_tiny": 1.0, **others}
  CONFIGS.clear()
  sizes = ("--blocks", "12", "--width", "256")
  found = ratios("--mixers", "hc", "ldm", "--forms", "auto", "state", *sizes)
  assert list(found) == ["preln_tiny", "hc", "ldm", "ldm state"]
  assert [config.model.mixer.form for config in CONFIGS] == ["auto", "auto", "auto", "state"]
  shapes = {(c.model.blocks, c.model.width, c.model.mlp_width) for c in CONFIGS}
  assert shapes == {(12, 256, 704)}
  monkeypatch.setattr(sys, "argv", ["steps", "--mixers", "hc", "--forms", "state"])
  with pytest.raises(InputError, match="--mixers ldm"):
    steps.main()
  monkeypatch.setattr(sys, "argv", ["steps", "--width", "130"])
  with pytest.raises(InputError, match="width"):
    steps.main()


def test_the_steps_command_takes_several_configs(monkeypatch, capsys):
  configs = [str(ROOT / "configs" / f"{name}.py") for name in ("ldm_tiny", "ldm_400m")]
  monkeypatch.setattr(sys, "argv", ["steps", "--config", *configs, "--json"])
  assert steps.main() == 0
  result = json.loads(capsys.readouterr().out)
  assert result["ratios"] == {"preln_tiny": 1.0, "ldm_tiny": 2.0, "ldm_400m": 2.0}
  monkeypatch.setattr(sys, "argv", ["steps", "--config", configs[0], configs[0]])
  with pytest.raises(InputError, match="same name"):
    steps.main()
