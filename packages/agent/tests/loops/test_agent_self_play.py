"""Self-play: both seats are the policy's and one is learned from, or each seat has a policy that learns."""

import asyncio

import pytest

from rl_agent import FailureError, LoopError, RowError, create_loop, validate_output
from rl_agent.base import Policy
from rl_agent.loops.self_play import SelfPlayLoop
from rl_agent.testing import FakeGenerator, FakeTokenizer

TOKENIZER = FakeTokenizer()
GAME = '''
class Race:
    """Seats add numbers in turns; whoever makes the sum 3 wins, as does the other one by an answer of another kind."""

    possible_agents = ("a", "b")

    def __init__(self, goal=3):
        self.goal = goal

    def reset(self, *, seed=None):
        self.sum, self.gain = 0, None
        self.agents, self.agent_selection = ["a", "b"], "a"

    def last(self):
        over, me = self.gain is not None, self.agent_selection
        return f"{me} sees {self.sum}", self.gain[me] if over else 0.0, over, False, {}

    def step(self, action):
        me = self.agent_selection
        other = "ab"["ab".index(me) - 1]
        if action is None:
            self.agents.remove(me)
        elif not action.isdigit():
            self.gain = {me: -1.0, other: 1.0}
        else:
            self.sum += int(action)
            if self.sum >= self.goal:
                self.gain = {me: 1.0, other: -1.0}
        self.agent_selection = other
'''


@pytest.fixture
def game(tmp_path):
    (tmp_path / "race.py").write_text(GAME)
    return f"{tmp_path}/race.py:Race"


def play(game, *turns, row, params=None, **options):
    turns = iter(turns)
    server = FakeGenerator(lambda _: [*TOKENIZER.encode(next(turns)), 1])
    loop = SelfPlayLoop(server, TOKENIZER, environment=game, **options)
    output = asyncio.run(loop.run({"max_new_tokens": 8, **(params or {})}, row))
    validate_output(output)
    return output, server


def shown(output):
    return TOKENIZER.decode([*output.prompt_token_ids, *output.completion_token_ids])


@pytest.mark.parametrize(("seat", "reward", "sees", "turns"), [("a", 1.0, [0, 2], 2), ("b", -1.0, [1], 1)])
def test_the_trajectory_is_that_of_the_seat_of_the_row(game, seat, reward, sees, turns):
    output, server = play(game, "1", "1", "1", row={"seat": seat})
    assert (output.reward, output.num_turns, output.metrics["num_steps"]) == (reward, turns, 3.0)
    assert [f"{seat} sees {each}" in shown(output) for each in sees] == [True] * turns
    assert {"a": "b", "b": "a"}[seat] + " sees" not in shown(output)
    assert len(server.requests) == 3


def test_a_seat_may_lose_by_what_the_other_answers(game):
    assert play(game, "1", "?", row={"seat": "a"})[0].reward == 1.0
    assert play(game, "1", "?", row={"seat": "b"})[0].reward == -1.0


def test_seats_of_one_seed_draw_differently(game):
    _, server = play(game, "1", "1", "1", row={"seat": "a"}, params={"seed": 5})
    assert len({request.sampling_params.seed for request in server.requests}) == 3


def test_arguments_of_the_row_reach_the_game(game):
    assert play(game, "1", "1", row={"seat": "b", "environment_args": {"goal": 2}})[0].reward == 1.0
    with pytest.raises(RowError, match="'environment_args' does not suit environment"):
        play(game, row={"seat": "b", "environment_args": {"gaol": 2}})


def test_a_row_without_a_seat_of_the_game_is_refused(game):
    with pytest.raises(RowError, match="field 'seat' of the row is 'c'; it needs one of a, b"):
        play(game, row={"seat": "c"})


def test_a_game_that_does_not_end_is_a_failure(game):
    with pytest.raises(FailureError, match=r"did not end in 4 turns \(max_turns\)"):
        play(game, *"00000", row={"seat": "a"}, max_turns=4)


def test_a_seat_that_never_moves_is_a_failure(game):
    with pytest.raises(FailureError, match="seat 'b' had no turn"):
        play(game, "3", row={"seat": "b"})


def test_the_prompt_is_what_the_first_seat_sees(game):
    loop = SelfPlayLoop(FakeGenerator(), TOKENIZER, environment=game)
    ids, images = asyncio.run(loop.prompt({"seat": "a"}))
    assert "a sees 0" in TOKENIZER.decode(ids)
    assert images == ()


def test_limits_are_positive(game):
    with pytest.raises(ValueError, match="max_turns=0"):
        SelfPlayLoop(FakeGenerator(), TOKENIZER, environment=game, max_turns=0)


def versus(game, *turns, row=None, **options):
    """Plays with a policy at each seat, of which each has a server; returns the trajectories and the servers."""
    says = zip("xy", turns, strict=True)
    servers = {name: FakeGenerator(lambda _, text=text: [*TOKENIZER.encode(text), 1]) for name, text in says}
    policies = {name: Policy(server, TOKENIZER) for name, server in servers.items()}
    given = {"environment": game, "seats": {"a": "x", "b": "y"}, **options}
    loop = create_loop("self_play", servers["x"], TOKENIZER, policies, **given)
    return asyncio.run(loop.run({"max_new_tokens": 8}, row or {})), servers


def test_policies_play_seats_and_learn_from_their_rewards(game):
    outputs, servers = versus(game, "1", "1")
    assert [(output.policy, output.reward, output.num_turns) for output in outputs] == [("x", 1.0, 2), ("y", -1.0, 1)]
    assert [len(server.requests) for server in servers.values()] == [2, 1]
    for output, seat in zip(outputs, "ab", strict=True):
        validate_output(output)
        assert f"{seat} sees" in shown(output)


def test_a_seat_that_never_moved_has_no_trajectory(game):
    assert [output.policy for output in versus(game, "3", "1")[0]] == ["x"]


@pytest.mark.parametrize(
    ("seats", "sentence"),
    [
        ({"a": "x", "b": "z"}, "asks for policy 'z', and there are x, y"),
        ({"a": "x"}, "option seats has a; it needs those of the game: a, b"),
    ],
)
def test_seats_are_those_of_the_game_and_of_policies(game, seats, sentence):
    with pytest.raises(LoopError, match=sentence):
        versus(game, "1", "1", seats=seats)


def test_a_loop_of_one_policy_has_no_other(game):
    with pytest.raises(LoopError, match="asks for policy 'x', and there is one, which has no name"):
        play(game, row={"seat": "a"}, seats={"a": "x", "b": "x"})
