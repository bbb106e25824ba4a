"""Environments by name, file and hub: what they show, which turns they take as actions, and which rows they give."""

import asyncio
import re

import gymnasium
import numpy
import pytest
from gymnasium import spaces

from rl_agent import FailureError, PluginError, RowError, validate_output
from rl_agent.environments.gymnasium import TextGame, read_action
from rl_agent.environments.openenv import read_action as read_fields
from rl_agent.loops.gym import GymLoop
from rl_agent.loops.reasoning_gym import ReasoningGymLoop
from rl_agent.registry import create_environments, loop_of_environments
from rl_agent.testing import FakeGenerator, FakeTokenizer

TOKENIZER = FakeTokenizer()
LAKE = "gymnasium:FrozenLake-v1"
FILE = '''
class Doors:
    """Two doors; the right one opens."""

    def __init__(self, right="left"):
        self.right = right

    def reset(self, *, seed):
        return [{"role": "system", "content": "be brave"}, {"role": "user", "content": f"door {seed}"}], {}

    def step(self, action):
        reward = float(action == self.right)
        return "closed", reward, bool(reward), action == "stay", {"rewards": {"opened": reward, "tried": 0.5}}


number = 3
'''


def play(name, *turns, row=None, **options):
    turns = iter(turns)
    server = FakeGenerator(lambda _: [*TOKENIZER.encode(next(turns)), 1])
    loop = GymLoop(server, TOKENIZER, environment=name, **options)
    output = asyncio.run(loop.run({"max_new_tokens": 64}, row or {"seed": 0}))
    validate_output(output)
    return output


def shown(output):
    return TOKENIZER.decode(output.prompt_token_ids), TOKENIZER.decode(output.completion_token_ids)


@pytest.fixture
def doors(tmp_path):
    (tmp_path / "doors.py").write_text(FILE)
    return f"{tmp_path}/doors.py:Doors"


def test_an_environment_of_a_file_is_played(doors):
    output = play(doors, "right", "left", row={"seed": 7})
    prompt, completion = shown(output)
    assert "be brave" in prompt
    assert "door 7" in prompt
    assert "closed" in completion
    assert (output.turn_rewards, output.extra_fields["end"]) == ((0.0, 1.0), "terminated")
    assert (output.metrics["reward/opened"], output.metrics["reward/tried"]) == (1.0, 1.0)


def test_arguments_are_the_loops_unless_a_row_has_its_own(doors):
    assert play(doors, "right", environment_args={"right": "right"}).reward == 1.0
    row = {"environment_args": {"right": "up"}}
    assert play(doors, "up", row=row, environment_args={"right": "right"}).reward == 1.0
    with pytest.raises(RowError, match="'environment_args' does not suit environment"):
        play(doors, "up", row={"environment_args": {"left": 1}})


def test_truncation_is_no_termination(doors):
    assert play(doors, "stay").extra_fields["end"] == "truncated"


def test_an_environment_of_a_module_is_made():
    source = create_environments("fractions:Fraction")
    assert source.make(numerator=3) == 3


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("chess", "environment 'chess' is none of gymnasium, harbor, openenv, reasoning_gym"),
        ("gymnasium:", "environment 'gymnasium:' is none of"),
        ("there.py:Doors", "there is no file there.py"),
        ("no_such_module:Doors", "cannot be loaded: ModuleNotFoundError: No module named 'no_such_module'"),
        ("fractions:Frac", "fractions has no 'Frac'"),
        ("gymnasium:FrozenLake-v99", "environment gymnasium:FrozenLake-v99 cannot be found"),
        ("gymnasium:no_such_module:Maze-v0", "needs no_such_module: pip install no_such_module"),
        ("math:pi", "environment 'math:pi' is a float; a class or function is needed"),
    ],
)
def test_a_name_that_leads_nowhere_is_refused(name, sentence):
    with pytest.raises(PluginError, match=re.escape(sentence)):
        create_environments(name)


def test_a_file_that_raises_is_refused_each_time(tmp_path):
    (tmp_path / "broken.py").write_text("1 / 0")
    for _ in range(2):
        with pytest.raises(PluginError, match="ZeroDivisionError"):
            create_environments(f"{tmp_path}/broken.py:Doors")


def test_a_hub_with_a_loop_of_its_name_is_played_by_it():
    assert loop_of_environments("reasoning_gym:chain_sum") == "reasoning_gym"
    assert loop_of_environments(LAKE) == loop_of_environments("mine.py:Doors") == "gym"


def test_frozen_lake_is_shown_and_crossed():
    turns = ["down", "1", "I go 1", "2", "1, no: 2", "1", "2"]
    output = play(LAKE, *turns, environment_args={"is_slippery": False})
    prompt, completion = shown(output)
    assert "[S]FFF\nFHFH\nFFFH\nHFFG\n\nAnswer with one action: a number from 0 to 3." in prompt
    assert "That is no action. Answer with one action: a number from 0 to 3." in completion
    assert "(Down)\nSFFF\n[F]HFH\n" in completion
    assert (output.reward, output.extra_fields["end"]) == (1.0, "terminated")
    assert output.turn_rewards == (0.0,) * 6 + (1.0,)


def test_arguments_of_an_environment_that_it_does_not_take():
    with pytest.raises(RowError, match="does not suit gymnasium:FrozenLake-v1"):
        play(LAKE, "1", environment_args={"is_slipery": False})


class Game(gymnasium.Env):
    """Shows what it is asked to, and gives the action back."""

    def __init__(self, observations, actions, seen=None):
        self.observation_space, self.action_space, self.seen = observations, actions, seen

    def reset(self, *, seed=None, options=None):
        return self.seen, {}

    def step(self, action):
        return self.seen, 1.0, True, False, {"action": action}


def test_a_picture_is_shown_as_a_picture():
    pixels = numpy.zeros((4, 6, 3), numpy.uint8)
    game = TextGame(Game(spaces.Box(0, 255, pixels.shape, numpy.uint8), spaces.Discrete(2), pixels))
    parts, _ = game.reset(seed=0)
    assert parts[0]["image"].startswith("data:image/png;base64,")
    assert parts[1] == {"type": "text", "text": "Answer with one action: a number from 0 to 1."}


def test_fields_of_an_observation_are_shown_by_line():
    seen = {"at": numpy.array([1, 2]), "mission": "go", "door": {"is_open": numpy.bool_(True)}}
    game = TextGame(Game(spaces.Dict(), spaces.Text(5), seen))
    assert game.reset(seed=0)[0].startswith("at: [1, 2]\nmission: go\ndoor: is_open: true\n\nAnswer with the text")


def test_actions_that_cannot_be_written_are_refused():
    with pytest.raises(PluginError, match="cannot be written as text"):
        TextGame(Game(spaces.Discrete(2), spaces.Dict({"a": spaces.Discrete(2)})))


NAMES = {"left": 0, "turn_right": 1}
BOX = spaces.Box(-1.0, 1.0, (2,))


@pytest.mark.parametrize(
    ("turn", "space", "action"),
    [
        ("go LEFT", spaces.Discrete(2), 0),
        ("left? no, turn_right.", spaces.Discrete(2), 1),
        ("I choose 2", spaces.Discrete(2, start=1), 2),
        ("action 12", spaces.Discrete(3), None),
        ("-1", spaces.Discrete(3, start=-1), -1),
        ("nothing", spaces.Discrete(2), None),
        ("[0.5, -1]", BOX, [0.5, -1.0]),
        ("[0.5, -1] or [0, 0.25]", BOX, [0.0, 0.25]),
        ("[0.5, 7]", BOX, None),
        ("[0.5]", BOX, None),
        ('["a", 1]', BOX, None),
        ("[1e999, 0]", BOX, None),
        ("[1, 0]", spaces.MultiBinary(2), [1, 0]),
        ("[2, 0]", spaces.MultiDiscrete([2, 2]), None),
        (" say it ", spaces.Text(9), "say it"),
    ],
)
def test_the_last_action_in_a_turn_is_taken(turn, space, action):
    found = read_action(turn, space, NAMES)
    assert (found.tolist() if hasattr(found, "tolist") else found) == action


TEXT = {"properties": {"message": {"type": "string"}, "loud": {"type": "boolean"}}, "required": ["message"]}
NUMBER = {"properties": {"column": {"type": "integer"}}, "required": ["column"]}
CHOICE = {"properties": {"way": {"enum": ["UP", "UPPER", "DOWN"]}}, "required": ["way"]}
TWO = {"properties": {"x": {"type": "integer"}, "y": {"type": "integer"}}, "required": ["x", "y"]}


@pytest.mark.parametrize(
    ("turn", "schema", "action"),
    [
        (" hello ", TEXT, {"message": "hello"}),
        ('so: {"message": "hi", "loud": true}', TEXT, {"message": "hi", "loud": True}),
        ('{"massage": "hi"}', TEXT, {"message": '{"massage": "hi"}'}),
        ("column 3", NUMBER, {"column": 3}),
        ("column 03", NUMBER, None),
        ("none", NUMBER, None),
        ("DOWN, then UPPER", CHOICE, {"way": "UPPER"}),
        ("left", CHOICE, None),
        ('{"x": 1} {"x": 1, "y": 2} {"y": 3}', TWO, {"x": 1, "y": 2}),
        ("1 2", TWO, None),
    ],
)
def test_an_action_of_openenv_is_read_by_its_schema(turn, schema, action):
    assert read_fields(turn, schema) == action


def test_rows_held_out_are_not_in_training(doors):
    for name in (doors, "reasoning_gym:chain_sum"):
        train, held_out = create_environments(name).rows(seed=1, num_train=50, num_eval=5)
        assert (len(train), len(held_out)) == (50, 5)
        assert not [row for row in held_out if row in train]
        assert len({str(row) for row in train}) == 50
        assert train != create_environments(name).rows(seed=2, num_train=50, num_eval=5)[0]


@pytest.mark.process  # the import of its tasks takes a second
def test_reasoning_gym_is_asked_by_name():
    server = FakeGenerator(lambda _: [*TOKENIZER.encode("<answer>7</answer>"), 1])
    loop = ReasoningGymLoop(server, TOKENIZER, environment="reasoning_gym:chain_sum")
    output = asyncio.run(loop.run({"max_new_tokens": 64}, {"index": 2}))
    assert output.extra_fields["task"] == "chain_sum"


def test_an_observation_that_is_nothing_is_a_failure(tmp_path):
    (tmp_path / "odd.py").write_text(FILE.replace('"closed"', '[{"type": "image", "image": "none"}]'))
    with pytest.raises(FailureError, match="its observation cannot be shown: image 'none' is not a data URL"):
        play(f"{tmp_path}/odd.py:Doors", "right")
    (tmp_path / "terms.py").write_text(FILE.replace('"tried": 0.5', '"tried": float("inf")'))
    with pytest.raises(FailureError, match="term 'tried' of its reward is inf"):
        play(f"{tmp_path}/terms.py:Doors", "right")
