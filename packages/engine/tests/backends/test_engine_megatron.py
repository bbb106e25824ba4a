"""The megatron backend on gloo: every layout steps as a plain Hugging Face model that sees one row at a time."""

from functools import partial
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from rl_engine import (
    EngineConfig,
    Head,
    Precision,
    create_engine,
)
from rl_engine.optimizer import ClippedAdamW

# Many engines in one start of two processes, on a machine that may be busy.
pytestmark = [pytest.mark.process, pytest.mark.timeout(600)]
SCRIPT = Path(__file__).parents[1] / "support" / "megatron_ranks.py"
_spec = spec_from_file_location("megatron_ranks", SCRIPT)
ranks = module_from_spec(_spec)
_spec.loader.exec_module(ranks)
rows_of = ranks.ranks.draw_rows
FEW = ["tied:sp2", "tied:pp2", "moe:ep2"]  # each axis once, with those of `ranks.FEW`
TWO = ["tied:dp2", "tied:tp2", "tied:sp2", "tied:pp2", "moe:sp2", "moe:ep2", "bias:tp2", "window:cp2", "odd:pp2",
       "deep:vpp2", "deep:cp2", "glm:ep2", "v3:sp2", "oss:ep2"]  # fmt: skip
FAMILIES = ["moe:dp2", "moe:ep2", "bias:pp2", "bias:tp2", "window:tp2", "window:cp2", "glm:dp2", "glm:sp2", "glm:pp2",
            "glm:cp2", "v3:dp2", "v3:pp2", "v3:ep2", "v3:cp2", "v2:sp2", "v2:ep2", "oss:dp2", "oss:sp2", "oss:pp2",
            "oss:cp2"]  # fmt: skip
FOUR = ["tied:tp2pp2", "tied:tp2dp2", "tied:pp2dp2", "tied:tp4", "moe:pp2ep2", "moe:tp2ep2", "moe:tp2pp2"]
MORE = ["tied:tp2cp2", "tied:pp2cp2", "moe:cp2ep2", "deep:vpp2dp2", "deep moe:vpp2ep2", "glm:pp2ep2", "glm:tp2ep2",
        "v3:tp2ep2", "v3:pp2ep2", "v3:tp2cp2", "oss:tp2ep2", "oss:pp2ep2"]  # fmt: skip


def but_for(few, cases):
    """The cases, of which all but a few are slow."""
    return [case if case in few else pytest.param(case, marks=pytest.mark.slow) for case in cases]


CASES, SAVED = but_for(FEW, TWO), but_for(FEW, ["tied:sp2", "tied:pp2", "moe:ep2", "bias:tp2", "deep:vpp2", "glm:ep2"])
PARTS = {name: but_for(ranks.FEW[name], cases) for name, cases in ranks.PARTS.items()}


def run_ranks(start_ranks, folder, size, cases, *more):
    for kind in ranks.MODELS:
        ranks.write_model(folder, kind)
    ranks.write_critic(folder)
    ranks.ranks.moe_oracle.write_model(folder / "experts")
    return start_ranks(SCRIPT, folder, size, *cases, *more)


@pytest.fixture(scope="module")
def few(tmp_path_factory, start_ranks):
    return run_ranks(start_ranks, tmp_path_factory.mktemp("few"), 2, FEW, "few")


@pytest.fixture(scope="module")
def two(tmp_path_factory, start_ranks):
    return run_ranks(start_ranks, tmp_path_factory.mktemp("two"), 2, TWO)


@pytest.fixture
def seen(request, case):
    """What the ranks found that ran this case: those of the default tier if it is one of its few."""
    is_slow = request.node.get_closest_marker("slow")
    return request.getfixturevalue("two" if is_slow else "few")


@pytest.fixture(scope="module")
def families(tmp_path_factory, start_ranks):
    return run_ranks(start_ranks, tmp_path_factory.mktemp("families"), 2, FAMILIES, "alone")


@pytest.fixture(scope="module")
def four(tmp_path_factory, start_ranks):
    return run_ranks(start_ranks, tmp_path_factory.mktemp("four"), 4, FOUR)


@pytest.fixture(scope="module")
def more(tmp_path_factory, start_ranks):
    return run_ranks(start_ranks, tmp_path_factory.mktemp("more"), 4, MORE)


class Oracle:
    """Scores, losses, norms and weights of two steps of a plain model and a plain AdamW."""

    def __init__(self, folder):
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, attn_implementation="eager")
        self.model.set_experts_implementation("eager")
        self.columns = self.scores()
        optimizer = ClippedAdamW(self.model.parameters(), ranks.OPTIMIZER)
        self.steps, self.weights = [], []
        for step in range(2):
            for group in optimizer.param_groups:
                group["lr"] = ranks.learning_rate(ranks.OPTIMIZER, step)
            optimizer.zero_grad()
            loss = self.loss()
            loss.backward()
            norm = torch.nn.utils.get_total_norm([parameter.grad for parameter in self.model.parameters()])
            optimizer.step()
            self.steps.append((float(loss.detach()), float(norm)))
            self.weights.append({name: tensor.clone() for name, tensor in ranks.weights_of(self.model).items()})

    def distributions(self):
        for prompt, completion, mask in rows_of(ranks.SEED):
            logits = self.model(torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1]
            yield logits.log_softmax(-1), torch.tensor(completion), torch.tensor(mask)

    def scores(self):
        with torch.no_grad():
            found = [(full, full.gather(1, labels[:, None])[:, 0]) for full, labels, _ in self.distributions()]
        likeliest = [full.topk(ranks.CANDIDATES, -1) for full, _ in found]
        return {
            "logprobs": [scored for _, scored in found],
            "entropy": [(-full.exp() * full).sum(-1) for full, _ in found],
            "sum_pi_squared": [full.exp().square().sum(-1) for full, _ in found],
            "candidate_token_ids": [top.indices for top in likeliest],
            "candidate_logprobs": [top.values for top in likeliest],
        }

    def loss(self):
        total, tokens = 0.0, 0
        for full, labels, mask in self.distributions():
            total = total - (full.gather(1, labels[:, None])[:, 0] * mask).sum()
            tokens += int(mask.sum())
        return total / tokens


@pytest.fixture(scope="module")
def oracles():
    return {}


def oracle_of(oracles, folder, kind):
    if kind not in oracles:  # the models are the same in every folder
        oracles[kind] = Oracle(folder / kind)
    return oracles[kind]


def check(seen, oracles, case, size):
    kind = case.split(":")[0]
    want, got = oracle_of(oracles, seen["folder"], kind), seen[case]
    for name, expected in want.columns.items():
        found = [iter(rows) for rows in got[name]]
        in_order = [next(found[rank]) for rank in ranks.owners(size)]
        for one, other in zip(in_order, expected, strict=True):
            torch.testing.assert_close(torch.tensor(one, dtype=other.dtype), other, rtol=1e-5, atol=1e-6)
    assert got["lopsided"] == pytest.approx(want.steps[0][0], rel=1e-5)
    assert got["step"] == pytest.approx(want.steps[0], rel=1e-5)
    assert got["second"] == pytest.approx(want.steps[1], rel=1e-4)
    assert got["weights"].keys() == want.weights[0].keys()
    moved = ranks.initial(seen["folder"] / kind)
    for name, tensor in got["weights"].items():
        assert torch.equal(tensor, moved[name]) == name.endswith("e_score_correction_bias"), name
    torch.testing.assert_close(got["weights"], want.weights[0], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(got["second_weights"], want.weights[1], rtol=1e-4, atol=1e-5)


@pytest.mark.promise("The Megatron backend steps like a plain model")
@pytest.mark.parametrize("case", CASES)
def test_two_ranks_step_like_a_plain_model(seen, oracles, case):
    check(seen, oracles, case, 2)


@pytest.mark.slow
@pytest.mark.parametrize("case", FAMILIES)
def test_two_ranks_of_more_families_step_like_a_plain_model(families, oracles, case):
    check(families, oracles, case, 2)


@pytest.mark.slow
@pytest.mark.parametrize("case", FOUR)
def test_four_ranks_step_like_a_plain_model(four, oracles, case):
    check(four, oracles, case, 4)


@pytest.mark.slow
@pytest.mark.parametrize("case", MORE)
def test_four_ranks_of_more_layouts_step_like_a_plain_model(more, oracles, case):
    check(more, oracles, case, 4)


def check_resumed(seen, cases):
    resumed = [case for case in cases if "resumed" in seen[case]]
    assert len(resumed) == len(cases) - len({case.split(":")[0] for case in cases})
    for case in resumed:
        assert seen[case]["resumed"] == pytest.approx(seen[case]["second"], rel=1e-8)
        torch.testing.assert_close(seen[case]["resumed_weights"], seen[case]["second_weights"], rtol=1e-8, atol=1e-10)


def test_a_checkpoint_of_one_layout_continues_on_another(few):
    check_resumed(few, FEW)


@pytest.mark.slow
def test_a_checkpoint_of_one_of_all_layouts_continues_on_another(two):
    check_resumed(two, TWO)


@pytest.mark.slow
def test_a_checkpoint_resumes_on_another_layout_per_family(families):
    check_resumed(families, FAMILIES)


@pytest.mark.slow
def test_a_checkpoint_of_one_layout_of_four_continues_on_another(four):
    check_resumed(four, FOUR)


@pytest.mark.slow
def test_a_checkpoint_of_cut_rows_resumes_with_sharded_layers(more):
    check_resumed(more, MORE)


@pytest.mark.slow
def test_a_layout_is_what_it_says(two):
    """Cut activations are half as long, and cut rows leave room for twice the tokens in a micro-batch."""
    assert two["tied:sp2"]["fed"] == pytest.approx(two["tied:tp2"]["fed"] / 2, abs=two["tied:tp2"]["micro-batches"])
    assert two["deep:cp2"]["fed"] == pytest.approx(two["tied:tp2"]["fed"] / 2, abs=two["deep:cp2"]["micro-batches"])
    assert 2 * two["deep:cp2"]["micro-batches"] <= two["tied:tp2"]["micro-batches"] + 1
    assert (two["tied:pp2"]["layers"], two["deep:vpp2"]["layers"]) == ([0], [0, 2])  # of rank 0


@pytest.mark.parametrize("case", SAVED)
def test_a_saved_model_is_an_ordinary_folder(seen, case):
    check_saved(seen, case)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["v3:ep2", "v2:sp2"])
def test_a_saved_model_of_latent_attention_is_an_ordinary_folder(families, case):
    check_saved(families, case)


def check_saved(seen, case):
    kind, layout = case.split(":")
    model = AutoModelForCausalLM.from_pretrained(seen["folder"] / f"{kind}-{layout}-model", dtype=torch.float64)
    torch.testing.assert_close(
        ranks.weights_of(model), seen[case]["second_weights" if "resumed" not in seen[case] else "resumed_weights"]
    )


def test_two_engines_of_a_process_share_a_layout(few):
    assert "Another engine of this process is laid out as ParallelConfig(tp=2" in few["refusal"]
    assert "Close the other engine first" in few["refusal"]


def test_a_bad_batch_on_one_rank_is_an_error_on_all(few):
    assert few["bad_batch"].startswith("Rank 1 refused its batch: completion_token_ids holds token id 999")


@pytest.mark.parametrize("case", PARTS["experts"])
def test_experts_are_evened_out_and_replayed(seen, case):
    oracle = ranks.ranks.moe_oracle
    for is_routed, got in zip((False, True), seen["experts"][case], strict=True):
        rows = oracle.draw_rows()
        want = oracle.reference(seen["folder"] / "experts", rows, is_routed=is_routed, coef=oracle.COEF)
        assert got == pytest.approx((want["loss"], want["aux"], want["norm"]), rel=1e-5)


@pytest.mark.slow
def test_shards_cover_the_weights(two):
    shares = {layout: two["experts"][f"experts:{layout} share"] for layout in ("dp2", "cp2", "sp2", "pp2", "ep2")}
    assert shares.pop("dp2") == shares.pop("cp2") == 1
    assert all(0.4 < share < 0.9 for share in shares.values())


def test_the_stream_of_weights_holds_one_parameter_at_a_time(few):
    most, largest = few["streamed"]
    assert most <= 3 * largest  # of a query, key and value that lie in one parameter, at most


@pytest.mark.parametrize("case", but_for(ranks.FEW["experts"], ["experts:ep2", "experts:pp2"]))
def test_experts_are_exported_in_batches_within_a_memory_bound(seen, case):
    """Two layers of four experts, three tensors of 4,096 bytes each; 21 other tensors, which pp2 sends one by one.

    By bytes allowed at once, collectives and the bytes that lay together: a layer's experts in one, or as few
    parameters (gate and up are one) as there may be.
    """
    wanted = {
        "experts:ep2": {1 << 28: (2, 12 * 4096), 1 << 14: (8, 4 * 4096), 1: (8, 4 * 4096)},
        "experts:pp2": {1 << 28: (21 + 2, 12 * 4096), 1 << 14: (21 + 8, 3 * 4096), 1: (21 + 16, 2 * 4096)},
    }
    assert seen["experts"][f"{case} exported"] == wanted[case]


def test_pairs_of_ranks_that_share_a_model_stay_apart(few):
    assert sorted(few["pairs"].count(pair) for pair in set(few["pairs"])) == [2, 2]


def step_alone(folder, step, backend="fsdp", **changes):
    """What a step comes to on one rank."""
    options = {"precision": Precision.FLOAT64, "optimizer": ranks.OPTIMIZER}
    engine = create_engine(backend, EngineConfig(model_path=str(folder), **(options | changes)))
    engine.initialize()
    found = step(engine, rows_of(ranks.SEED))
    engine.close()
    return found


@pytest.mark.parametrize("case", PARTS["candidates"])
def test_named_candidates_are_scored_with_their_gradient(seen, case):
    want = step_alone(seen["folder"] / "tied", ranks.candidates_step)
    assert seen["candidates"][case][:2] == pytest.approx(want[:2], rel=1e-5)
    torch.testing.assert_close(seen["candidates"][case][2], want[2], rtol=1e-5, atol=1e-6)


@pytest.mark.promise("with an adapter too, from a checkpoint of `fsdp`")
@pytest.mark.parametrize("case", PARTS["adapters"])
def test_an_adapter_on_two_ranks_steps_like_one_on_one(seen, case):
    kind = case.split(":")[0]
    step = partial(ranks.adapter_step, folder=seen["folder"] / f"{kind} adapter")
    want = step_alone(seen["folder"] / kind, step, "fsdp" if kind == "tied" else "megatron", lora=ranks.LORA[kind])
    assert seen["adapters"][case][:2] == pytest.approx(want[:2], rel=1e-5)
    torch.testing.assert_close(seen["adapters"][case][2], want[2], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("case", PARTS["critics"])
def test_a_critic_on_two_ranks_steps_like_one_on_one(seen, case):
    want = step_alone(seen["folder"] / "critic", ranks.critic_step, head=Head.VALUE)
    assert seen["critics"][case][:2] == pytest.approx(want[:2], rel=1e-5)
    torch.testing.assert_close(seen["critics"][case][2], want[2], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("case", PARTS["dist_checkpoints"])
def test_megatron_lm_weights_are_read_by_another_layout(seen, case):
    want = ranks.initial(seen["folder"] / case.split(":")[0])
    torch.testing.assert_close(seen["dist_checkpoints"][case], want, rtol=0, atol=0)


def test_a_rank_that_lacks_weights_in_that_format_is_told_by_all(few):
    assert "of shape None; the model of model_path, qwen3, has" in few["dist_checkpoints"]["refusal"]
