"""Rewards by served models, over real sockets: what they are asked, what is read, and what becomes of no answer."""

import asyncio
import gzip

import pytest
from aiohttp import web

from rl_agent.errors import described
from rl_agent.proxy import RecordingProxy
from rl_agent.testing import FakeGenerator, FakeTokenizer
from rl_rollout.types import ServerAddress
from rl_trainer.config.schema import RewardPart, RewardSection, ServedModel
from rl_trainer.errors import ConfigError, RewardError
from rl_trainer.planning.preflight import check
from rl_trainer.rewards import Scorer
from rl_trainer.rewards.served import RateLimit, ServedReward, Window, at, conversation

ROW = {
    "prompt": [{"role": "system", "content": "be brief"}, {"role": "user", "content": "2 + 2?"}],
    "data_source": "mine",
    "reward_model": {"ground_truth": "4"},
}


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch):
    monkeypatch.setattr("rl_trainer.rewards.served._FIRST_PAUSE_S", 0.001)


class Server:
    """Answers by a script, not before `holds` requests have run together, and keeps what it was asked."""

    def __init__(self, *script, holds=1):
        self.script, self.asked, self.headers = list(script), [], []
        self.num_running = self.max_running = 0
        self.holds, self.is_full = holds, asyncio.Event()

    async def answer(self, request):
        self.asked.append(await request.json())
        self.headers.append(request.headers)
        self.num_running += 1
        self.max_running = max(self.max_running, self.num_running)
        try:
            said = self.script.pop(0) if len(self.script) > 1 else self.script[0]
            if said == "hang":
                await asyncio.sleep(3600)
            if self.num_running == self.holds:
                self.is_full.set()
            await self.is_full.wait()
            return said if isinstance(said, web.Response) else web.json_response(said)
        finally:
            self.num_running -= 1


def judged(text, **more):
    return {"choices": [{"message": {"role": "assistant", "content": text}}], **more}


def ask(server, *texts, timeout_s=60.0, **settings):
    """The score of each text, or the error."""

    async def main():
        app = web.Application()
        app.router.add_post("/{path:.*}", server.answer)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        given = {"kind": "judge", "url": f"{url}/v1", "model": "wise", "prompt": "good? {completion}", **settings}
        source = ServedReward("taste", RewardPart(**{k: v for k, v in given.items() if v is not None} | {
            "url": f"{url}/classify" if given["kind"] == "classifier" else given["url"]
        }), timeout_s=timeout_s)  # fmt: skip
        try:
            async with asyncio.timeout(60):
                return await asyncio.gather(*(source.call(text, ROW) for text in texts), return_exceptions=True)
        finally:
            await source.close()
            await runner.cleanup()

    return asyncio.run(main())


def test_a_judge_is_asked_in_words_and_its_last_score_counts():
    server = Server(judged("The score could be 3. Score: -7.5 of 10"))
    prompt = "Q: {prompt}\nA: {completion}\nTruth: {ground_truth} {other} {}"
    assert ask(server, "four {ground_truth}", prompt=prompt, max_tokens=99) == [-7.5]
    (asked,) = server.asked
    assert asked == {
        "model": "wise",
        "messages": [
            {
                "role": "user",
                "content": "Q: system: be brief\n\nuser: 2 + 2?\nA: four {ground_truth}\nTruth: 4 {other} {}",
            }
        ],
        "temperature": 0.0,
        "max_tokens": 99,
    }


@pytest.mark.parametrize(
    ("said", "settings", "score"),
    [
        ('{"reason": "well", "score": 0.5}', {}, 0.5),
        ("[[8]]", {"pattern": r"\[\[(\d+)\]\]"}, 8.0),
        ("SCORE = 1", {}, 1.0),
    ],
)
def test_a_score_is_read_by_the_pattern(said, settings, score):
    assert ask(Server(judged(said)), "x", **settings) == [score]


FUNCTIONS = """
def ask(text, row):
    return f"{row['reward_model']['ground_truth']} or {text}?"

def chat(text, row):
    return [{"role": "system", "content": "judge"}, {"role": "user", "content": text}]

async def read(answer, row):
    return 2 * answer.count("x") if "x" in answer else None

def wrong(answer, row):
    return "much"
"""


@pytest.mark.process
def test_prompt_and_parser_may_be_functions(tmp_path):
    """The parser's None is asked for again, what is no number is an error."""
    (tmp_path / "own.py").write_text(FUNCTIONS)
    own = f"{tmp_path / 'own.py'}"
    server = Server(judged("hm"), judged("x and x"))
    assert ask(server, "four", prompt=f"{own}:ask", parser=f"{own}:read") == [4.0]
    assert [each["messages"] for each in server.asked] == [[{"role": "user", "content": "4 or four?"}]] * 2
    server = Server(judged("x"))
    (error,) = ask(server, "four", prompt=f"{own}:chat", parser=f"{own}:wrong")
    assert server.asked[0]["messages"] == [
        {"role": "system", "content": "judge"}, {"role": "user", "content": "four"}
    ]  # fmt: skip
    with pytest.raises(RewardError, match="own.py:wrong' raised ValueError: it gave 'much'; a number, or None if"):
        raise error


def test_a_request_goes_to_the_replica_with_the_fewest():
    """Of two replicas one answers no request before three have come."""

    async def main():
        servers = [Server(judged("score: 1"), holds=3), Server(judged("score: 2"))]
        part = RewardPart(kind="judge", model=ServedModel(path="folder"), prompt="good? {completion}")
        source, runners, addresses = ServedReward("taste", part), [], []
        for server in servers:
            app = web.Application()
            app.router.add_post("/v1/chat/completions", server.answer)
            runners.append(runner := web.AppRunner(app, shutdown_timeout=0.1))
            await runner.setup()
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            url = f"http://127.0.0.1:{runner.addresses[0][1]}"
            addresses.append(ServerAddress(url=url, model="folder", pid=1))
        source.use(addresses)
        try:
            async with asyncio.timeout(60):
                first = [asyncio.create_task(source.call("x", ROW)) for _ in range(2)]
                assert await first[1] == 2.0
                assert [await source.call("x", ROW) for _ in range(3)] == [2.0] * 3
                held = await asyncio.gather(first[0], *(source.call("x", ROW) for _ in range(4)))
                assert sorted(held) == [1.0, 1.0, 1.0, 2.0, 2.0]
        finally:
            await source.close()
            for runner in runners:
                await runner.cleanup()
        return [len(server.asked) for server in servers], servers[0].asked[0]["model"]

    assert asyncio.run(main()) == ([3, 6], "folder")


@pytest.mark.parametrize(
    "first",
    [
        judged("I would rather not say"),
        judged(None),
        {"choices": []},
        web.Response(status=429, text="slow down"),
        web.Response(status=500, text="oh"),
        web.Response(text="no JSON"),
        judged("score: 1" + "0" * 400),
    ],
)
def test_an_answer_without_a_score_is_asked_for_again(first):
    server = Server(first, judged("score: 2"))
    assert ask(server, "x") == [2.0]
    assert len(server.asked) == 2


@pytest.mark.process
@pytest.mark.parametrize(
    ("script", "settings", "num_asked", "sentence"),
    [
        ([judged("hm")], {"max_attempts": 2}, 2, "got no score from http.* in 2 attempts; .*finds no score in 'hm'"),
        # On a slow machine the deadline passes before the server hears of the request.
        (["hang"], {"timeout_s": 0.2, "max_attempts": 2}, None, "in 2 attempts; the last: no answer within 0.2 s"),
        ([web.Response(status=400, text="no such model")], {}, 1, "refuses the request, HTTP 400: no such model"),
    ],
)  # fmt: skip
def test_no_score_is_an_error_and_never_zero(script, settings, num_asked, sentence):
    server = Server(*script)
    (error,) = ask(server, "x", **settings)
    assert isinstance(error, RewardError)
    with pytest.raises(RewardError, match=sentence):
        raise error
    assert num_asked is None or len(server.asked) == num_asked


def test_a_server_that_asks_for_a_pause_gets_it(monkeypatch):
    """But no longer one than our own longest, and what is not a number of seconds is passed over."""
    slept, sleep = [], asyncio.sleep

    async def note(delay_s, *given):
        slept.append(delay_s)
        await sleep(0, *given)

    monkeypatch.setattr("rl_trainer.rewards.served.asyncio.sleep", note)
    busy = [web.Response(status=429, headers={"Retry-After": after}) for after in ("7", "9999", "Fri, 31 Dec 1999")]
    assert ask(Server(*busy, judged("Score: 0.5")), "a", max_attempts=4) == [0.5]
    assert [each for each in slept if each >= 0.001] == [7.0, 30.0, 0.004]


def test_a_server_that_is_not_there_is_an_error():
    (error,) = ask(Server(judged("score: 1")), "x", url="http://127.0.0.1:9/v1", max_attempts=1)
    assert isinstance(error, RewardError)
    assert "in 1 attempts; the last: Cannot connect" in str(error)


def test_a_classifier_gets_the_conversation_or_filled_prompt():
    answer = {"data": [{"index": 0, "label": "LABEL_0", "probs": [0.25], "num_classes": 1}]}
    server = Server(answer)
    assert ask(server, "four", kind="classifier", prompt=None, model=None) == [0.25]
    assert server.asked == [{"messages": [*ROW["prompt"], {"role": "assistant", "content": "four"}]}]
    server = Server({"data": [{"data": [-1.5]}]})
    assert ask(server, "four", kind="classifier", prompt="{completion}!", score_at="data.0.data.0") == [-1.5]
    assert server.asked == [{"model": "wise", "input": "four!"}]
    (error,) = ask(Server(answer), "x", kind="classifier", score_at="data.1.probs.0", max_attempts=1)
    assert "the answer has no data.1.probs.0: {'data'" in str(error)


def test_no_more_requests_run_at_a_time_than_allowed():
    server = Server(judged("score: 1"), holds=3)
    assert ask(server, *"abcdefghij", max_concurrent=3) == [1.0] * 10
    assert server.max_running == 3


def test_the_key_comes_from_the_environment(monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", "secret")
    server = Server(judged("score: 1"))
    ask(server, "x", api_key_env="JUDGE_KEY")
    ask(server, "x")
    assert [headers.get("Authorization") for headers in server.headers] == ["Bearer secret", None]


def test_a_key_that_is_not_set_is_told_before_anything_starts(monkeypatch):
    from rl_trainer.config import load_config

    monkeypatch.delenv("JUDGE_KEY", raising=False)
    part = ["kind=judge", "url=http://localhost:1/v1", "model=m", "prompt='{completion}'", "api_key_env=JUDGE_KEY"]
    config = load_config("quickstart", [f"reward.parts.taste.{setting}" for setting in part])
    with pytest.raises(ConfigError, match="reward.parts.taste.api_key_env=JUDGE_KEY is not set in the environment"):
        check(config, [])


def test_a_judge_and_a_rule_are_weighted_over_an_openai_server():
    """The recording proxy serves chat completions; the judge says 8 of a right answer, and nothing of others."""
    tokenizer = FakeTokenizer()

    def reply(request):
        is_right = "the answer 4" in tokenizer.decode(request.prompt_token_ids)
        return [*tokenizer.encode("Score: 8" if is_right else "Sorry"), 1]

    async def main():
        proxy = RecordingProxy(FakeGenerator(reply), tokenizer)
        url = (await proxy.start()).replace("/v1", "/sessions/judge/v1")
        judge = RewardPart(
            kind="judge", url=url, model="policy", prompt="Rate: {completion}", weight=0.125, max_attempts=2
        )
        scorer = Scorer(RewardSection(parts={"right": RewardPart(kind="rule"), "taste": judge}))
        row = {**ROW, "data_source": "reasoning_gym/chain_sum", "reward_model": {"ground_truth": "the answer 4"}}
        try:
            return await scorer.score("the answer 4", row), await asyncio.gather(
                scorer.score("5", row), return_exceptions=True
            )
        finally:
            await scorer.close()
            await proxy.stop()

    score, (error,) = asyncio.run(main())
    assert (score.reward, score.components) == (2.0, {"right": 1.0, "taste": 8.0})
    assert isinstance(error, RewardError)
    assert "finds no score in 'Sorry'" in str(error)


def test_a_reward_model_that_rl_serve_serves_scores_completions(tmp_path):
    import torch
    from transformers import AutoConfig, AutoModelForSequenceClassification

    from rl_rollout import ServerConfig
    from rl_rollout.reward_server import ScoreServer
    from rl_rollout.testing import write_tiny_model

    folder = write_tiny_model(tmp_path)
    torch.manual_seed(1)
    config = AutoConfig.from_pretrained(folder, num_labels=1)
    AutoModelForSequenceClassification.from_config(config, dtype=torch.float32).save_pretrained(folder)
    texts = ("4", "four", "12")

    async def main():
        server = ScoreServer(ServerConfig(model_path=str(folder), num_threads=1))
        url = (await server.start()).url
        part = RewardPart(kind="classifier", url=f"{url}/pooling", score_at="data.0.data.0", weight=2.0)
        scorer = Scorer(RewardSection(parts={"liked": part}))
        try:
            scores = await asyncio.gather(*(scorer.score(text, ROW) for text in texts))
            turns = [[*ROW["prompt"], {"role": "assistant", "content": text}] for text in texts]
            return scores, await server.score([server._conversation(each) for each in turns])
        finally:
            await scorer.close()
            await server.stop()

    scores, wanted = asyncio.run(main())
    assert [score.components["liked"] for score in scores] == pytest.approx(wanted, abs=1e-5)
    assert [score.reward for score in scores] == pytest.approx([2 * each for each in wanted], abs=1e-5)
    assert len({round(each, 4) for each in wanted}) == 3


def test_a_window_holds_back_what_would_be_too_much():
    """By hand: at most 10 within 60 seconds."""
    window = Window(10)
    assert window.delay_s(10, now=0.0) == 0.0
    window.take(6, now=0.0)
    window.take(3, now=20.0)
    assert window.delay_s(1, now=30.0) == 0.0
    assert window.delay_s(2, now=30.0) == 30.0, "until the first 6 are a minute old"
    assert window.delay_s(8, now=30.0) == 50.0, "until the 3 are as well"
    assert window.delay_s(25, now=30.0) == 50.0, "more than fits at all goes alone"
    window.take(-2, now=31.0)  # the guess was too high
    assert window.delay_s(3, now=32.0) == 0.0
    assert window.delay_s(4, now=60.0) == 0.0


def test_requests_wait_for_their_turn_within_both_limits(monkeypatch):
    """The clock is ours: sleeping moves it."""
    now = [0.0]

    async def sleep(delay):
        now[0] += delay

    async def main():
        limit = RateLimit(requests_per_minute=3, tokens_per_minute=100)
        monkeypatch.setattr("rl_trainer.rewards.served.time.monotonic", lambda: now[0])
        monkeypatch.setattr("rl_trainer.rewards.served.asyncio.sleep", sleep)
        at = []
        for tokens in (10, 10, 10, 10, 80, 30):
            await limit.wait(tokens)
            at.append(now[0])
        limit.correct(-20)
        return at

    assert asyncio.run(main()) == [0.0, 0.0, 0.0, 60.0, 60.0, 120.0]


def test_places_in_json_and_conversations():
    value = {"a": [{"b": 1}, 2]}
    assert [at(value, path) for path in ("a.0.b", "a.-1", "a.2", "a.b", "c", "a.1.x")] == [1, 2, None, None, None, None]
    assert conversation([{"role": "user", "content": "hi"}]) == "hi"
    parts = [{"type": "image"}, {"type": "text", "text": " what?"}]
    assert conversation([{"role": "user", "content": parts}]) == "[image] what?"


BOMB = gzip.compress(bytes(1 << 25))


@pytest.mark.process
@pytest.mark.parametrize(
    ("said", "settings", "words"),
    [
        (web.Response(body=BOMB, headers={"Content-Encoding": "gzip"}), {}, "sent more than 16777216 bytes"),
        (web.Response(body=b"no gzip", headers={"Content-Encoding": "gzip"}), {}, "not decode content-encoding: gzip"),
        (web.Response(body=BOMB[:20], headers={"Content-Encoding": "gzip"}), {}, "is not JSON"),
        (web.Response(status=400, body=BOMB, headers={"Content-Encoding": "gzip"}), {}, "sent more than"),
        (web.Response(body=b"[" * 100_000), {}, "is not JSON"),
        (web.Response(body=b"\xff\xfe"), {}, "is not JSON"),
        (web.Response(body=b"[]"), {}, "has no choices.0.message.content"),
        (judged(["score: 1"]), {}, "is not text"),
        (judged({"score": 1}), {}, "is not text"),
        ({"data": [{"probs": [True]}]}, {"kind": "classifier"}, "True is not a number"),
        ({"data": [{"probs": [10**400]}]}, {"kind": "classifier"}, "is not a number"),
        ({"data": [{"probs": ["1e999"]}]}, {"kind": "classifier"}, "the score is inf"),
        ({"data": [{"probs": [[1.0]]}]}, {"kind": "classifier"}, "is not a number"),
        ({"data": 3}, {"kind": "classifier"}, "has no data.0.probs.0"),
    ],
)
def test_an_answer_that_cannot_be_is_one_error_with_the_url(said, settings, words):
    settings = settings | ({"model": None} if settings else {})
    server = Server(said)
    (error,) = ask(server, "x", max_attempts=1, **settings)
    assert isinstance(error, RewardError)
    assert words in str(error)
    assert "http://127.0.0.1:" in str(error)


def test_a_server_that_claims_endless_tokens_holds_nobody_up():
    server = Server(judged("score: 1", usage={"total_tokens": 10**18}))
    assert ask(server, "x", "y", tokens_per_minute=10**9) == [1.0, 1.0]


@pytest.mark.parametrize("text", ["a\ud800b", "a\0b", "\ud83d", "\udfff\0"])
@pytest.mark.parametrize("kind", ["judge", "classifier"])
def test_odd_text_to_and_from_a_judge_is_no_error_of_ours(text, kind):
    """The score counts; an answer without one is a failure whose message can be written."""
    settings = {"prompt": "{completion}{ground_truth}"} if kind == "judge" else {"prompt": None, "kind": kind}
    good = judged(f"{text} score: 3") if kind == "judge" else {"data": [{"probs": [3.0]}], "note": text}
    at = {} if kind == "judge" else {"score_at": "data.0.probs.0"}
    server = Server(good)
    assert ask(server, text, **settings, **at) == [3.0]
    (error,) = ask(Server(judged(text)), text, max_attempts=1, **settings, **at)
    assert isinstance(error, RewardError)
    assert described(error).encode()
