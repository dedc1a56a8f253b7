"""A stop request hears signals, hands them to a request around it, and leaves no handler behind."""

import os
import signal

import pytest

from ldm_jax.training.signals import StopRequest


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_request_inside_another_passes_the_signal_on(number):
  before = signal.getsignal(number)
  with StopRequest() as outer:
    with StopRequest() as inner:
      assert not inner
      os.kill(os.getpid(), number)
      assert inner.signal == number
    assert outer.signal == number
    with StopRequest() as later:
      assert not later
  assert signal.getsignal(number) == before


def test_a_quiet_request_changes_nothing():
  with StopRequest() as outer:
    with StopRequest():
      pass
    assert not outer


def test_a_second_interrupt_ends_it_at_once():
  with StopRequest():
    os.kill(os.getpid(), signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
      os.kill(os.getpid(), signal.SIGINT)
