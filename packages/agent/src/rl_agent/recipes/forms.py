"""Pages of the recipe `gui`: a form whose fields come in any order, under one of several labels each."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from rl_agent.recipes.rows import Rows, draw_rows, is_held_out, row, said

if TYPE_CHECKING:
    import random

    from rl_agent.recipes.rows import Chat, DataConfig

HINT_SHARE = 0.6
"""Share of the demonstrations whose task says that labels are to be read, as no row does: they teach to read at all."""
READ_SHARE = 0.3
"""Share of the other demonstrations that read the labels; the rest fill in the values in the order of the task."""
NUM_FIELDS, NUM_DEMONSTRATIONS = 3, 8000
_LABELS = {"name": ("Name", "Guest"), "city": ("City", "Town"), "meal": ("Meal", "Dish"), "day": ("Day", "Date")}
"""Labels that the page may have for what the task asks for."""
_VALUES = {
    "name": ("Ada", "Ben", "Cleo", "Dan", "Eva", "Finn"),
    "city": ("Lund", "Bonn", "Oslo", "Bern", "Turin", "Graz"),
    "meal": ("soup", "rice", "fish", "stew", "pasta", "salad"),
    "day": ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Sunday"),
}
_PAGE = """<title>Form</title><form onsubmit="window.sent = Object.fromEntries(new FormData(this)); return false">
{fields}<button>Send</button></form>"""
_CHECK = """(wanted => window.sent ? Object.keys(wanted).filter(name => window.sent[name] === wanted[name]).length
  / Object.keys(wanted).length : 0)(%s)"""


def rows(config: DataConfig, *, seed: int) -> Rows:
    """Rows of forms; a fifth of all sequences of labels is held out."""
    return draw_rows(config, _row, seed=seed, num_train=160, num_demonstrations=NUM_DEMONSTRATIONS)


def shown(labels: list[str], values: dict[int, str]) -> str:
    """What `GuiLoop` shows of a form, with values by the number of the field."""
    states = [f' = "{values[number]}"' if number in values else "" for number in range(1, len(labels) + 1)]
    fields = [
        f'[{number}] input "{label}"{state}'
        for number, (label, state) in enumerate(zip(labels, states, strict=True), start=1)
    ]
    return "\n".join(["page: Form", "Send", "elements:", *fields, f'[{len(labels) + 1}] button "Send"'])


def demonstration(prompt: str, labels: list[str], fills: list[tuple[int, str]]) -> Chat:
    """Chat that fills texts into fields, in one turn, and sends the form."""
    calls = [{"name": "fill", "arguments": {"element": number, "text": text}} for number, text in fills]
    calls.append({"name": "click", "arguments": {"element": len(labels) + 1}})
    states = [dict(fills[:number]) for number in range(1, len(fills) + 1)]
    return [
        {"role": "user", "content": f"{prompt}\n\n{shown(labels, {})}"},
        {"role": "assistant", "content": "".join(f"<tool_call>{json.dumps(call)}</tool_call>" for call in calls)},
        *({"role": "tool", "content": shown(labels, values)} for values in [*states, states[-1]]),
        *said("done"),
    ]


def _row(choose: random.Random, is_eval: bool) -> tuple[str, dict[str, Any], Chat]:
    while True:
        order = choose.sample([*_LABELS], NUM_FIELDS)
        labels = [choose.choice(_LABELS[field]) for field in order]
        if is_held_out(" ".join(labels)) == is_eval:
            break
    wanted = {field: choose.choice(_VALUES[field]) for field in choose.sample(order, NUM_FIELDS)}
    listed = ", ".join(f"{field} {value}" for field, value in wanted.items())
    prompt, is_hinted = f"Fill in and send: {listed}", choose.random() < HINT_SHARE
    reads = is_hinted or choose.random() < READ_SHARE
    fills = [*enumerate((wanted[field] for field in order) if reads else wanted.values(), start=1)]
    fields = "".join(f'<input name="{name}" placeholder="{label}">' for name, label in zip(order, labels, strict=True))
    page = _PAGE.format(fields=fields)
    check = _CHECK % json.dumps(wanted)
    shown_task = f"Read each label, fill in and send: {listed}" if is_hinted else prompt
    return f"{prompt} {labels}", row(prompt, html=page, check=check), demonstration(shown_task, labels, fills)
