"""The promises of the READMEs, and the test that holds each: `python tools/promises.py` prints the page.

A test that holds one has the mark `@pytest.mark.promise("sentence")`. Tests of published conformance suites, which run
where that mark is not known, are listed in `SUITES`.
"""

from __future__ import annotations

import ast
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
TIERS = ("slow", "integration", "wheels", "gpu")
HEAD = """# Promises and their tests

What the READMEs promise, and the test that fails when it is no longer true. The table is made from the marks
`@pytest.mark.promise` of the tests. A tier in brackets is that of a test that the default run leaves out. Where a README
promises by naming a kind of error or a figure, its table or the JSON of the figure is the reference.

| promise | package | test |
|---|---|---|
"""
SUITES = {
    "packages/ckpt/src/rl_ckpt/testing/votes.py": {
        "test_nobody_commits_before_everybody_has_everything": "Nobody commits before everybody has everything",
        "test_a_failed_sync_leaves_staged_tensors_as_they_were": "A staged receiver never holds a mixed model",
        "test_engine_contents_are_attested_or_nothing_is_committed": "Receipts attest what the engine really holds",
        "test_waits_end_at_the_deadline_and_name_who_did_not_answer": "Every wait ends at its deadline and names the peer",
        "test_a_raising_source_aborts_everywhere_and_the_next_works": "A source that fails is drained",
    },
    "packages/ckpt/src/rl_ckpt/testing/suite.py": {
        "test_every_kind_of_tensor_arrives_bit_for_bit": "Weights arrive bit for bit",
    },
    "packages/ckpt/src/rl_ckpt/testing/processes.py": {
        "test_the_sender_is_killed_at_every_message": "SIGKILL of the sender at any message: nothing is left, the next sync works",
        "test_a_receiver_is_killed_at_every_message": "SIGKILL of a receiver at any message likewise",
    },
    "packages/tq/src/rl_tq/testing/_rows.py": {
        "test_a_value_is_written_once": "A value is written once",
        "test_cleared_rows_are_stale_and_others_are_not": "A reference to what was cleared raises",
        "test_each_task_gets_each_row_once": "Each task consumes each row once",
        "test_a_waiter_wakes_and_holds_up_nobody": "One that waits holds up nobody",
    },
    "packages/tq/src/rl_tq/testing/_leases.py": {
        "test_a_client_that_leaves_gives_its_claims_back": "Claims of a client that leaves come back",
        "test_a_lease_expires_for_a_waiter": "A lease ends at `lease_s`",
        "test_a_claim_is_consumed_by_an_ack_and_comes_back_by_a_nack": "`ack` consumes a claim, `nack` gives it back",
        "test_what_comes_back_too_often_is_a_dead_letter": "After three returns a row is a dead letter",
        "test_restore_returns_what_was_acked_since": "`restore(partition, s)` brings back what was acked after s, and fences the trainer before off",
        "test_waits_and_leases_end_at_their_deadline": "No call waits beyond its deadline",
    },
    "packages/tq/src/rl_tq/testing/_values.py": {
        "test_what_was_put_and_what_was_got_are_copies": "What you get is yours",
    },
    "packages/engine/src/rl_engine/testing/conformance.py": {
        "test_logprobs_come_back_in_the_order_of_the_rows": "Rows that move between ranks come back in order",
        "test_nan_is_refused_and_nothing_changes": "A step with a non-finite gradient changes nothing",
    },
    "packages/rollout/src/rl_rollout/testing/conformance.py": {
        "test_every_token_has_a_logprob_and_a_version": "Every token has a log-prob and a weight version",
        "test_logprobs_are_of_the_distribution_that_was_sampled_from": "Log-probs are of the distribution that was sampled from",
        "test_a_failed_update_leaves_the_old_version_serving": "A failed update leaves the old version serving",
        "test_abort_returns_what_there_is_and_it_can_be_resumed": "An abort gives the tokens so far, and they can be gone on from",
        "test_pause_abort_ends_requests_in_flight": "So does a pause",
        "test_what_a_server_cannot_give_is_refused": "What a server cannot give is refused",
    },
}
"""By file and test of a published suite, what it holds."""


class Promise(NamedTuple):
    """A sentence, and where it is held."""

    sentence: str
    package: str
    file: str
    test: str
    tier: str


def promises() -> list[Promise]:
    """All of them, the repository's own first."""
    files = [*ROOT.glob("tests/**/*.py"), *ROOT.glob("csrc/tests/**/*.py"), *ROOT.glob("packages/*/tests/**/*.py")]
    found = [each for file in files if ".promise(" in (text := file.read_text()) for each in _of_file(file, text)]
    for name, tests in SUITES.items():
        found += [Promise(sentence, _package(Path(name)), name, test, "") for test, sentence in tests.items()]
    return sorted(found, key=lambda each: (each.package != "all", each.package, each.file, each.sentence))


def page() -> str:
    """The page of the documentation."""
    rows = [
        f"| {each.sentence} | {each.package} | `{each.file}::{each.test}`{f' [{each.tier}]' if each.tier else ''} |"
        for each in promises()
    ]
    return HEAD + "\n".join(rows) + "\n"


def _of_file(file: Path, text: str) -> list[Promise]:
    tree, name = ast.parse(text), file.relative_to(ROOT)
    of_file = next((_marks(node.value) for node in tree.body if _is_pytestmark(node)), set())
    found: list[Promise] = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        marked = of_file.union(*(_marks(each) for each in node.decorator_list))
        tier = next((tier for tier in TIERS if tier in marked), "")
        for each in node.decorator_list:
            if isinstance(each, ast.Call) and isinstance(each.func, ast.Attribute) and each.func.attr == "promise":
                sentence = ast.literal_eval(each.args[0])
                found.append(Promise(sentence, _package(name), name.as_posix(), node.name, tier))
    return found


def _is_pytestmark(node: ast.stmt) -> bool:
    return isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "pytestmark"


def _marks(node: ast.expr) -> set[str]:
    """`slow` of `pytest.mark.slow`, and likewise of a list of such."""
    attributes = (each for each in ast.walk(node) if isinstance(each, ast.Attribute))
    return {each.attr for each in attributes if getattr(each.value, "attr", "") == "mark"}


def _package(file: Path) -> str:
    return {"packages": file.parts[1], "csrc": "csrc"}.get(file.parts[0], "all")


if __name__ == "__main__":
    print(page(), end="")
