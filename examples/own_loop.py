"""An agent loop of one's own: the policy is asked the same question twice in one prompt, and answers once.

`rl-train quickstart agent.loop=own_loop.py:RepeatedLoop`
"""

from rl_agent import AgentLoop, tokenize_prompt
from rl_agent.session import Session


class RepeatedLoop(AgentLoop):
    async def run(self, sampling_params, row):
        """One generation; `Session` keeps its tokens, log-probs and weight versions."""
        *before, last = row["prompt"]
        asked = {**last, "content": f"{last['content']} {last['content']}"}
        prompt, images = tokenize_prompt(self.tokenizer, {**row, "prompt": [*before, asked]})
        session = Session(self.server, self.tokenizer, prompt, sampling_params, images=images)
        await session.generate()
        return session.finish()
