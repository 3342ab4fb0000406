"""Plans behind the operators: kept by signature, bounded, checked on request, safe in threads."""

import copy
import os
import pickle
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import kda_ops
from kda_kernels import plan
from kda_kernels.packed_decode.contract import CONTRACT as PACKED_DECODE
from kda_kernels.testing.cases import Case, clone, draw, run_reference
from kda_kernels.testing.compare import assert_same_bits


@pytest.fixture
def launcher(operator):
    """The operator's launcher, with no plans before the test and none left behind."""
    launcher = plan.launcher(operator.name)
    launcher.forget()
    yield launcher
    launcher.forget()


@pytest.fixture
def lookups(monkeypatch):
    """The names of operators whose kernel was looked up, in order."""
    found = []
    original = plan.cpu_kernel

    def look_up(name):
        found.append(name)
        return original(name)

    monkeypatch.setattr(plan, "cpu_kernel", look_up)
    return found


def test_a_signature_is_planned_once(function, call, launcher, lookups):
    for _ in range(3):
        function(**call())
    assert len(lookups) == 1
    function(**call(seed=7))
    assert len(lookups) == 1


def test_values_are_no_part_of_a_signature_and_every_fact_is(function, call, launcher, lookups):
    function(**call())
    changed = [
        call({"S": 8}),
        call({"B": 2, "R": 5}),
        call({"H": 1}),
        call(row_padding=1),
        call(slot_padding=64),
        call(index_dtype=torch.int64),
        call(state_dtype=torch.bfloat16),
        call(parameter_dtype=torch.bfloat16),
        call(activation=torch.float16),
        call(scalars={"lower_bound": None}),
        call(scalars={"scale": 1.0}),
        call(scalars={"state_layout": "kv"}),
    ]
    for count, values in enumerate(changed, start=2):
        function(**values)
        assert len(lookups) == count, f"change {count - 1} did not make a signature of its own"


def test_many_signatures_share_one_kernel(function, call, launcher):
    for slots in range(7, 12):
        function(**call({"S": slots}))
    kernels = {id(found.kernel) for plans in launcher._plans for found in plans.values()}
    assert len(kernels) == 1


def test_plans_are_bounded(function, call, launcher, monkeypatch):
    monkeypatch.setattr(plan, "MAX_PLANS", 4)
    expected = None
    for slots in range(7, 20):
        output = function(**call({"S": slots}, seed=slots))
        assert torch.isfinite(output).all()
        assert max(len(plans) for plans in launcher._plans) <= 4
        expected = output if expected is None else expected
    assert_same_bits(function(**call({"S": 7}, seed=7)), expected, "a plan made again")


def test_refused_calls_leave_no_plan(function, call, launcher):
    values = call()
    values["dt_bias"] = values["dt_bias"][:-1]
    for _ in range(3):
        with pytest.raises(kda_ops.ContractError):
            function(**values)
    assert not any(launcher._plans)


def test_a_pool_that_loses_its_alignment_misses_the_plan(function, call, launcher):
    values = call()
    function(**values)
    storage = torch.zeros(values["state"].numel() + 8)
    for offset in (0, 1, 4):
        state = storage[offset:][: values["state"].numel()].view_as(values["state"])
        if state.data_ptr() % 16:
            with pytest.raises(kda_ops.ContractError, match="16-byte aligned"):
                function(**{**values, "state": state})
        else:
            function(**{**values, "state": state})


def test_duplicate_live_destinations_are_refused_under_kda_check(
    operator, function, call, launcher, monkeypatch
):
    monkeypatch.setenv("KDA_CHECK", "1")
    values = call()
    before = clone(values)
    indices = values["state_indices"].flatten()
    legal = indices.clone()
    indices[1] = indices[0]
    values["state_indices"] = indices.view_as(values["state_indices"])
    with pytest.raises(ValueError, match=f"state_indices must be distinct.*slot {indices[0]} tw"):
        function(**values)
    assert_same_bits(values["state"], before["state"], "state")
    # Null rows may repeat, and legal calls give what they give unchecked.
    values["state_indices"] = torch.full_like(values["state_indices"], -1)
    assert function(**values).count_nonzero() == 0
    values["state_indices"] = legal.view_as(values["state_indices"])
    checked = function(**values)
    launcher.forget()
    monkeypatch.delenv("KDA_CHECK")
    assert_same_bits(checked, function(**before), "output")


def test_threads_calling_at_once_get_their_own_results(function, call, launcher):
    calls = [call({"S": 7 + i % 3}, seed=i) for i in range(16)]
    again = [clone(values) for values in calls]
    expected = [function(**values) for values in calls]
    launcher.forget()

    def run(values):
        # Grad mode is a thread's own.
        with torch.no_grad():
            return function(**values)

    with ThreadPoolExecutor(4) as threads:
        outputs = list(threads.map(run, again))
    for i, (mine, theirs) in enumerate(zip(outputs, expected, strict=True)):
        assert_same_bits(mine, theirs, f"output of call {i}")
        assert_same_bits(again[i]["state"], calls[i]["state"], f"state of call {i}")


@pytest.mark.parametrize(
    "again", [copy.copy, copy.deepcopy, lambda e: pickle.loads(pickle.dumps(e))]
)
def test_errors_survive_copies_and_process_borders(function, call, again):
    values = call()
    values["dt_bias"] = values["dt_bias"][:-1]
    with pytest.raises(kda_ops.ContractError) as caught:
        function(**values)
    error = again(caught.value)
    assert type(error) is kda_ops.ContractError and str(error) == str(caught.value)
    facts = ("operator", "argument", "rule", "fact", "source")
    assert all(getattr(error, name) == getattr(caught.value, name) for name in facts)


WITHOUT_COMPILER = """
import warnings
import torch, kda_ops
from kda_kernels.plan import CONTRACTS
from kda_kernels.testing.cases import Case, draw, clone, run_reference
with torch.no_grad(), warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    for contract in CONTRACTS:
        for slots in (8, 9):
            values = draw(contract, Case(dict(B=2, H=1, S=slots, L=3, R=4, N=2, T=2)))
            again = clone(values)
            output = getattr(kda_ops, contract.public_name)(**values)
            assert torch.equal(output, run_reference(contract, again)), contract.name
            assert torch.equal(values["state"], again["state"]), contract.name
for warning in caught:
    print(warning.category.__name__, str(warning.message))
"""


def test_without_a_compiler_references_serve_with_one_warning_each_that_says_what_to_do(tmp_path):
    environment = {k: v for k, v in os.environ.items() if k != "CXX"}
    environment |= {"PATH": str(tmp_path), "KDA_CACHE_DIR": str(tmp_path / "cache")}
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_COMPILER],
        capture_output=True,
        text=True,
        timeout=300,
        env=environment,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith("RuntimeWarning")]
    assert len(lines) == 3
    for contract, line in zip(plan.CONTRACTS, lines, strict=True):
        assert f"kda::{contract.name} runs as its slow PyTorch reference" in line
        assert "kda-ops build" in line and "compiler" in line


@pytest.mark.parametrize("heads", [1, 3, 6, 8, 12, 16, 24, 32, 48, 64, 96])
def test_every_head_count_gives_the_references_result(operator, function, call, heads):
    sizes = {"B": 1, "R": 1, "N": 1, "T": 1, "S": 3, "H": heads}
    values = call(sizes, activation=torch.float32)
    again = clone(values)
    expected = run_reference(operator, again)
    output = function(**values)
    torch.testing.assert_close(output, expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(values["state"], again["state"], rtol=1e-4, atol=1e-5)


def test_a_call_does_not_read_the_environment_again_once_it_is_planned(monkeypatch):
    # KDA_CHECK is read with the plan, so that a decode step pays nothing for it.
    launcher = plan.launcher("packed_decode")
    launcher.forget()
    values = draw(PACKED_DECODE, Case({"B": 2, "H": 1, "S": 4}))
    kda_ops.packed_kda_decode(**values)
    monkeypatch.setenv("KDA_CHECK", "1")
    values["state_indices"][:] = 1
    kda_ops.packed_kda_decode(**values)
    launcher.forget()
    with pytest.raises(ValueError, match="distinct"):
        kda_ops.packed_kda_decode(**values)
    launcher.forget()
