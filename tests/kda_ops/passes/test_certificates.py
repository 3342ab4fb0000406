"""No match is shipped that the certificate does not confirm; one that fails stops no compile."""

import dataclasses

import pytest
import torch

from kda_ops.passes import Options, certificate, manager


@pytest.fixture(autouse=True)
def _no_certificates(monkeypatch):
    monkeypatch.setattr(certificate, "_certified", set())


def misread(monkeypatch, **changes):
    """Let the matcher misread an argument, with everything else as it is."""
    read = manager.packed_step

    def wrong(*arguments):
        step = read(*arguments)
        found = {name: change(step.arguments) for name, change in changes.items()}
        return dataclasses.replace(step, arguments=dataclasses.replace(step.arguments, **found))

    monkeypatch.setattr(manager, "packed_step", wrong)


MISREADINGS = {
    "keys for values in the state": {"layout": lambda a: "vk" if a.layout == "kv" else "kv"},
    "q for k": {"parts": lambda a: (a.parts[1], a.parts[0], a.parts[2])},
    "k for v": {"parts": lambda a: (a.parts[0], a.parts[2], a.parts[1])},
    "the other gate": {"lower_bound": lambda a: -5.0},
    "another scale": {"scale": lambda a: a.scale * 1.05},
    "no bias": {"bias": lambda a: None},
}


@pytest.mark.parametrize("name", MISREADINGS)
@pytest.mark.parametrize("pool", [torch.float32, torch.bfloat16])
def test_a_misreading_is_refused_by_the_certificate(step, monkeypatch, name, pool):
    misread(monkeypatch, **MISREADINGS[name])
    captured = step.check_step(step.Spelling(pool=pool))
    assert captured.reasons == ["CERTIFICATE"]
    assert captured.after == captured.before


def test_without_certificates_the_misreading_would_have_been_shipped(step, monkeypatch):
    misread(monkeypatch, **MISREADINGS["keys for values in the state"])
    spelling = step.Spelling()
    captured = step.capture(
        step.StepLayer(spelling), *step.inputs(spelling), options=Options(certify=False)
    )
    assert captured.matches == 1


def test_a_certificate_that_cannot_be_run_is_a_refusal(step, monkeypatch):
    def broken(**_):
        raise RuntimeError("out of luck")

    monkeypatch.setitem(certificate.REFERENCES, "packed_decode", broken)
    captured = step.check_step(step.Spelling())
    assert captured.reasons == ["CERTIFICATE"]
    assert "RuntimeError: out of luck" in captured.findings[0].detail


def test_a_matcher_that_fails_is_a_refusal(step, monkeypatch):
    def broken(*_):
        raise IndexError("a graph nobody thought of")

    monkeypatch.setattr(manager, "read_core", broken)
    captured = step.check_step(step.Spelling())
    assert captured.reasons == ["NOT_UNDERSTOOD"]


def test_layers_that_are_written_alike_are_certified_once(step, monkeypatch):
    runs = []
    monkeypatch.setattr(certificate, "run_once", runs.append)
    first, second = (step.StepLayer(step.Spelling()) for _ in range(2))

    def run(*x):
        return first(*x), second(*x)

    captured = step.capture(run, *step.inputs(step.Spelling()))
    assert captured.matches == 2
    assert len(runs) == 1


def test_a_certificate_leaves_random_numbers_and_threads_as_they_were(step):
    torch.manual_seed(5)
    state, threads = torch.get_rng_state(), torch.get_num_threads()
    assert step.check_step(step.Spelling()).matches == 1
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.get_num_threads() == threads
