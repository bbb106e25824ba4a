"""The rule `code` against completions that solve nothing, and against correct ones in strange styles."""

import asyncio
import runpy
import shutil
from pathlib import Path

import pytest

from rl_agent.sandbox import worker as workers
from rl_trainer.rewards.code import CodeTests

CORPUS = Path(__file__).with_name("code_corpus")
ATTACKS = runpy.run_path(str(CORPUS / "attacks.py"))["ATTACKS"]
SOLUTIONS = runpy.run_path(str(CORPUS / "solutions.py"))["SOLUTIONS"]


@pytest.fixture(scope="module", params=["namespaces", "bare"])
def machine(request):
    """As the kernel of this machine permits, and without namespaces and control groups."""
    if request.param == "namespaces":
        yield request.param
        return
    start = workers.Worker.start
    with pytest.MonkeyPatch.context() as patch:
        bare = {"may_isolate": False, "may_group": False}
        patch.setattr(workers.Worker, "start", lambda *args, **kwargs: start(*args, **kwargs, **bare))
        yield request.param
    shutil.rmtree("/tmp/left-by-code", ignore_errors=True)  # there is no scratch folder of its own


def scores_of(cases, timeout_s):
    """All in one pool of processes: what one leaves behind, the next one finds."""

    async def main():
        judge = CodeTests(4, timeout_s=timeout_s, memory_mb=256)

        async def score(truth, code):
            row = {"data_source": "mine", "reward_model": {"ground_truth": truth}}
            return await judge.call(f"```python\n{code}\n```", row)

        try:
            found = await asyncio.gather(*(score(*case) for case in cases.values()))
        finally:
            await judge.close()
        return dict(zip(cases, found, strict=True))

    return asyncio.run(main())


@pytest.fixture(scope="module")
def attacks(machine):
    return scores_of(ATTACKS, timeout_s=3.0)


@pytest.fixture(scope="module")
def solutions(machine):
    return scores_of(SOLUTIONS, timeout_s=60.0)


@pytest.mark.promise("No attack of the corpus gets a reward")
@pytest.mark.process
def test_an_attack_gets_nothing(attacks):
    assert {name: attacks[name] for name in ATTACKS if attacks[name] != 0.0} == {}


@pytest.mark.promise("Every correct solution gets its reward")
@pytest.mark.process
def test_a_correct_solution_gets_all(solutions):
    assert {name: solutions[name] for name in SOLUTIONS if solutions[name] != 1.0} == {}


def test_the_corpora_are_large():
    assert len(ATTACKS) >= 60
    assert len(SOLUTIONS) >= 60
